"""Scripts that reach sharded parameters by other ways than the attributes and the call of their model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = pytest.mark.rotating  # one more way each


@pytest.fixture
def sharded(accelerator):
    return accelerator("shard=2")


class Gaussian:
    """A distribution over weights, which is no module (nitarshan/bayes-by-backprop)."""

    def __init__(self, mu: Tensor, rho: Tensor) -> None:
        self.mu, self.rho = mu, rho

    def log_prob(self, value: Tensor) -> Tensor:
        sigma = F.softplus(self.rho)
        return (-sigma.log() - (value - self.mu) ** 2 / (2 * sigma**2)).sum()


class BayesianLinear(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.mu, self.rho = nn.Parameter(torch.randn(out, width)), nn.Parameter(torch.full((out, width), -2.0))
        self.bias = nn.Parameter(torch.zeros(out))
        self.weight, self.listed = Gaussian(self.mu, self.rho), [self.bias]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight.mu + F.softplus(self.weight.rho) * 0.5
        return F.linear(x, weight, self.listed[0]), self.weight.log_prob(weight)


class Averaged(nn.Module):
    """A wrapper that passes calls on by a `__call__` of its own, as ema-pytorch does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __call__(self, *args):
        return self.model(*args)


def batch(device: str, step: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(step)).to(device)


def clip_by_units(parameters: list[Tensor], factor: float = 0.05) -> None:
    """Adaptive clipping of gradients, in place on norms (timm)."""
    for p in parameters:
        largest = p.detach().norm(dim=0).clamp_(min=1e-3).mul_(factor)
        norm = p.grad.norm(dim=0)
        p.grad.copy_(torch.where(norm < largest, p.grad, p.grad * (largest / norm.clamp(min=1e-6))))


def test_parameters_in_objects_and_lists(sharded):
    def script(device):
        model = BayesianLinear(4, 3).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        trace = []
        for step in range(3):
            out, prior = model(batch(device, step))
            loss = out.square().mean() + 0.01 * prior
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace += [loss.detach(), model.weight.mu.detach().clone()]
        return [*trace, *model.parameters()]

    assert_same(*on_both(script))


def test_norms_that_are_changed_in_place(sharded):
    def script(device):
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
        trace, average = [], []
        for step in range(3):
            loss = model(batch(device, step)).square().mean()
            loss.backward()
            average = average or [p.detach().clone() for p in model.parameters()]  # now they are on the workers
            clip_by_units([p for p in model.parameters() if p.ndim > 1])
            with torch.no_grad():
                for p in model.parameters():
                    ratio = p.norm().pow_(2).clamp_(max=10) / p.grad.norm().add_(1e-6)
                    p.sub_(p.grad * ratio, alpha=0.01)
                    p.grad = None
                torch._foreach_copy_(average, [0.9 * a + 0.1 * p for a, p in zip(average, model.parameters())])
            trace.append(loss.detach())
        return [*trace, *average, *model.parameters()]

    assert_same(*on_both(script))


def test_a_list_as_model_and_a_wrapper_that_passes_calls_on(sharded):
    def script(device):
        layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 2)]).to(device)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
        wrapper = Averaged(model)
        optimizer = torch.optim.SGD([*layers.parameters(), *model.parameters()], lr=0.1)
        trace = []
        for step in range(3):
            x = batch(device, step)
            loss = layers[1](layers[0](x).tanh()).square().mean() + wrapper(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        return [*trace, *layers.parameters(), *model.parameters()]

    assert_same(*on_both(script))
