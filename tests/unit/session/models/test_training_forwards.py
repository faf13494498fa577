"""Which forwards train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moreh_ap.session.models.training_forwards import (
    draws_for_pyro,
    draws_in_backward,
    follow_from_each_other,
    marks_parameters,
    may_differentiate_arguments,
    runs_in_script,
    trains_itself,
)


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


class Shaken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * torch.rand(())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * torch.empty(len(gradient)).uniform_()


class Straight(Shaken):
    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.clone()


def shake(x: Tensor) -> Tensor:
    return Shaken.apply(x)


def test_a_backward_of_the_script_that_draws():
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return shake(x)

    class Rounding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Straight.apply(x)

    assert draws_in_backward(nn.Sequential(nn.Linear(2, 2), Block()))
    assert not draws_in_backward(Rounding()) and not draws_in_backward(nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))


class Binary(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self.weight, "org"):
            self.weight.org = self.weight.data.clone()
        self.weight.data = self.weight.org.sign()
        return super().forward(x)


class Counting(nn.Linear):
    """Sets attributes, none of them on a parameter but one of PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 1
        self.inner.calls = 2
        self.weight.data = self.weight.data * 2
        return super().forward(x)


def test_a_forward_that_sets_an_attribute_on_a_parameter():
    assert marks_parameters(nn.Sequential(nn.Linear(2, 2), Binary(2, 2))) and runs_in_script(Binary(2, 2))
    assert not marks_parameters(Counting(2, 2)) and not runs_in_script(nn.Sequential(Counting(2, 2), nn.Dropout()))


def test_a_forward_that_differentiates_one_argument_by_another():
    class PathLengths(nn.Module):
        def forward(self, w: Tensor, x: Tensor) -> Tensor:
            (gradient,) = torch.autograd.grad(x.sum(), w, create_graph=True)
            return gradient.norm()

    class Adaptive(nn.Module):
        """As VQGAN weighs its adversarial loss: a method of the forward's module differentiates."""

        def weight(self, loss: Tensor, last: Tensor) -> Tensor:
            return torch.autograd.grad(loss, last, retain_graph=True)[0].norm()

        def forward(self, x: Tensor, last: Tensor) -> Tensor:
            return x.mean() * self.weight(x.mean(), last)

    assert may_differentiate_arguments(PathLengths()) and may_differentiate_arguments(Adaptive())
    assert not may_differentiate_arguments(nn.Sequential(Adaptive())), "each module is asked when it is called"
    assert not may_differentiate_arguments(nn.Linear(2, 2))


def test_arguments_follow_from_each_other_where_one_was_computed_from_another():
    w = torch.ones(2, requires_grad=True)
    hidden = w * 2
    assert follow_from_each_other(((w, hidden.exp().sum()), {})), "of a leaf"
    assert follow_from_each_other(((hidden,), {"image": hidden.exp().sum()})), "of a result"
    assert not follow_from_each_other(((w, torch.ones(2, requires_grad=True) * 3), {}))
    assert not follow_from_each_other(((hidden, w.exp()), {})), "both of a third"
    assert not follow_from_each_other(((torch.ones(2), 3), {}))
