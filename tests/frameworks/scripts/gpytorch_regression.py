"""Exact and variational Gaussian processes with GPyTorch: marginal likelihood and ELBO, predictions with variances.

With --ap it has the one line; prints losses and predictions.
"""

import math
import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import gpytorch
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.means import ConstantMean
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy
from torch.utils.data import DataLoader, TensorDataset


class ExactProcess(gpytorch.models.ExactGP):
    """A process with a scaled RBF kernel, conditioned on all rows."""

    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean, self.covariance = ConstantMean(), ScaleKernel(RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.covariance(x))


class SparseProcess(gpytorch.models.ApproximateGP):
    """A process with inducing points, trained on batches."""

    def __init__(self, points):
        distribution = CholeskyVariationalDistribution(points.size(0))
        super().__init__(VariationalStrategy(self, points, distribution, learn_inducing_locations=True))
        self.mean, self.covariance = ConstantMean(), ScaleKernel(RBFKernel())

    def forward(self, x):
        return MultivariateNormal(self.mean(x), self.covariance(x))


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    x = torch.linspace(0, 1, 40)
    y = torch.sin(2 * math.pi * x) + 0.1 * torch.randn(40)
    x, y = x.to(device), y.to(device)

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    model = ExactProcess(x, y, likelihood).to(device)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"exact: loss {loss.item():.6f} noise {likelihood.noise.item():.6f}")
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        predicted = likelihood(model(torch.linspace(0, 1, 5).to(device)))
        print(f"mean {predicted.mean.sum().item():.5f} variance {predicted.variance.sum().item():.5f}")

    model = SparseProcess(x[:10].clone().unsqueeze(-1)).to(device)
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(device)
    elbo = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=40)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    for _ in range(2):
        for rows, targets in DataLoader(TensorDataset(x.cpu().unsqueeze(-1), y.cpu()), batch_size=20):
            optimizer.zero_grad()
            loss = -elbo(model(rows.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            print(f"variational: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
