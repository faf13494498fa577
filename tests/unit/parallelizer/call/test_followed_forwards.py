"""A forward in pieces is followed without values once, and its losses stay those of the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy

import numpy.random  # noqa: F401  # a forward that imports it has a new stream, and counts as one that draws
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from moreh_ap.parallelizer.call import followed_forwards
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.followed_forwards import FollowedForwards
from moreh_ap.parallelizer.call.micro_batches import MicroBatchedForward
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.policy import RandomPolicy

CPU = torch.device("cpu")
ROWS = 6
SEEN: list[bool] = []
"""Of each forward whether it ran without values."""


class Model(nn.Module):
    """A classifier whose mean is taken over valid targets, unequally many in each piece of a batch."""

    def __init__(self, beside: Callable[[Model, Tensor], None] | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.beside = beside

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        SEEN.append(self.head.weight.is_meta)
        if self.beside is not None:
            self.beside(self, labels)
        loss = F.cross_entropy(self.head(x), labels)
        return loss if (labels[:1] >= 0).all() else 2 * loss


def counts(model: Model, labels: Tensor) -> None:
    model.count = getattr(model, "count", 0) + 1  # type: ignore[assignment]


def draws_from_host(model: Model, labels: Tensor) -> None:
    random.random()


def draws(model: Model, labels: Tensor) -> None:
    torch.rand(labels.shape)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (ROWS,), generator=generator)
    labels[torch.rand(ROWS, generator=generator) < 0.4] = -100
    labels[0], labels[3] = (-100, -100) if seed == 3 else (1, 1)  # the first row of each piece decides by what
    return torch.randn(ROWS, 4, generator=generator), labels


def train(model: Model, steps: int) -> tuple[list[float], int]:
    """Returns losses and how often the model was followed without values."""
    SEEN.clear()
    call = Call(model, "split", CPU, kinds=("share",), random=RandomPolicy())
    known = FollowedForwards(deepcopy(model).to("meta"))
    losses = []
    for step in range(steps):
        forward = MicroBatchedForward(call, batch(step), {}, num_micro_batches=2, rows=ROWS, known=known)
        forward.backward([torch.ones(())])
        losses.append(float(forward.outputs[0]))
        assert forward.shapes[0].shape == ()
    return losses, sum(SEEN)


def expected(model: Model, steps: int) -> list[float]:
    """Returns losses of whole batches, and adds to the gradients what these give."""
    losses = []
    for step in range(steps):
        x, labels = batch(step)
        factor = 1 if labels[0] >= 0 else 2
        loss = factor * F.cross_entropy(model.head(x), labels)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("beside", "times"),
    [(None, 2), (counts, 6), (draws_from_host, 6), (draws, 6)],
    ids=["pure", "attribute", "Python's random", "torch.rand"],
)
def test_followed_once(beside: Callable[[Model, Tensor], None] | None, times: int) -> None:
    """Once for each way that numbers lead; a forward with effects each time."""
    model = Model(beside)
    alone = deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        losses, followed = train(model, 6)
    assert followed == times
    assert losses == pytest.approx(expected(alone, 6), rel=1e-6)
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.grad, whole.grad)


def test_a_model_that_needs_values() -> None:
    """It runs itself, without gradients, each time."""

    class Reads(Model):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            loss = super().forward(x, labels)
            return loss if self.head.weight.sum() < 1e9 else loss * 0

    model = Reads()
    alone = deepcopy(model)
    losses, _ = train(model, 3)
    assert losses == pytest.approx(expected(alone, 3), rel=1e-6)


class _Others:
    """The other worker of an exchange: adds its numbers, in the order in which they are asked for."""

    def __init__(self, answers: list[list[float]]) -> None:
        self.answers = answers

    def __call__(self, numbers: Tensor, op: object = None, group: object = None) -> None:
        others = torch.tensor(self.answers.pop(0), dtype=numbers.dtype).reshape(numbers.shape)
        numbers.copy_(torch.minimum(numbers, others) if op is not None else numbers + others)


def test_inputs_of_another_worker_lead_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then all follow the forward again: workers have to tell each other equally much."""
    model, x, labels = Model(), *batch(0)
    others = _Others([[1], [1], [-1], [1], [0], [4.0]])  # runs on meta; one mean, remembered, reads; its valid targets
    monkeypatch.setattr(followed_forwards.dist, "all_reduce", others)
    call = Call(model, "split", CPU, kinds=("share",), axis=Axis(0, 2, None))
    runs = FollowedForwards(deepcopy(model).to("meta"))
    given = call, [x, labels], _spec_of(x, labels), call.random.begin(CPU), lambda *_: nullcontext(), _never
    own = float((labels >= 0).sum())
    SEEN.clear()
    assert [float(one) for one in runs.run(*given)[1]] == [own + 4.0]
    others.answers = [[1], [2.0]]
    assert [float(one) for one in runs.run(*given)[1]] == [own + 2.0] and len(SEEN) == 1
    others.answers = [[0], [1], [1], [-1], [1], [0], [3.0]]  # the other worker has to follow the forward
    assert [float(one) for one in runs.run(*given)[1]] == [own + 3.0] and len(SEEN) == 2


def _spec_of(*args: Tensor) -> object:
    return tree_flatten((args, {}))[1]


def _never() -> object:
    raise AssertionError("the model can be followed without values")
