"""Bayesian regression with Pyro: a module whose weights are drawn, automatic guides, predictions, a network.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import pyro
import pyro.distributions as dist
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn


def normal(scale, shape, device):
    zero, scale = torch.tensor(0.0, device=device), torch.tensor(scale, device=device)
    return PyroSample(dist.Normal(zero, scale).expand(shape).to_event(len(shape)))


class Regression(PyroModule):
    def __init__(self, device):
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = normal(1.0, [1, 3], device)
        self.linear.bias = normal(10.0, [1], device)

    def forward(self, x, y=None):
        bounds = torch.tensor(0.0, device=x.device), torch.tensor(10.0, device=x.device)
        sigma = pyro.sample("sigma", dist.Uniform(*bounds))
        mean = self.linear(x).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
        return mean


class Network(PyroModule):
    def __init__(self, device, hidden=8):
        super().__init__()
        self.first, self.second = PyroModule[nn.Linear](3, hidden), PyroModule[nn.Linear](hidden, 1)
        self.first.weight, self.first.bias = normal(1.0, [hidden, 3], device), normal(1.0, [hidden], device)
        self.second.weight, self.second.bias = normal(1.0, [1, hidden], device), normal(1.0, [1], device)

    def forward(self, x, y=None):
        mean = self.second(torch.tanh(self.first(x))).squeeze(-1)
        with pyro.plate("data", x.shape[0]):
            pyro.sample("obs", dist.Normal(mean, 0.1), obs=y)
        return mean


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pyro.set_rng_seed(0)
    x = torch.randn(80, 3).to(device)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).to(device) + 0.1 * torch.randn(80).to(device)
    model = Regression(device).to(device)
    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), loss=Trace_ELBO())
    for _ in range(5):
        print(f"loss {svi.step(x, y) / 80:.6f}")
    samples = Predictive(model, guide=guide, num_samples=5, return_sites=("linear.weight", "obs", "_RETURN"))(x)
    print(f"mean {samples['obs'].mean().item():.6f}")
    pyro.clear_param_store()
    network = Network(device).to(device)
    svi = SVI(network, AutoNormal(network), pyro.optim.ClippedAdam({"lr": 0.02}), loss=TraceMeanField_ELBO())
    for _ in range(3):
        print(f"loss {svi.step(x, y) / 80:.6f}")


if __name__ == "__main__":
    main()
