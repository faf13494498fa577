"""Which forwards train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moreh_ap.session.models.training_forwards import draws_for_pyro, trains_itself


class Learner(nn.Module):
    def forward(self, x: Tensor) -> float:
        loss = x.sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Policy(nn.Module):
    """It has an optimizer, and leaves the training to the script."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def learn(self, x: Tensor) -> None:
        self(x).sum().backward()
        self.optimizer.step()


def test_only_a_forward_that_steps_an_optimizer_trains():
    assert trains_itself(Learner())
    assert not trains_itself(Policy())
    assert not trains_itself(nn.Linear(2, 2))


def test_a_forward_behind_a_decorator_is_found():
    class Decorated(Learner):
        forward = torch.enable_grad()(Learner.forward)

    assert trains_itself(Decorated())


def test_a_forward_that_draws_for_pyro():
    class Mixture(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return pyro.sample("z", x)  # noqa: F821

    class PyroModule(nn.Module):
        __module__ = "pyro.nn.module"

    class Regression(PyroModule):
        def forward(self, x: Tensor) -> Tensor:
            return x

    assert draws_for_pyro(Mixture()) and draws_for_pyro(Regression())
    assert not draws_for_pyro(Policy()) and not draws_for_pyro(nn.Linear(2, 2))
