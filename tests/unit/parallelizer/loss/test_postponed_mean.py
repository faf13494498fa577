"""A mean that nothing else in a forward uses takes one exchange, another mean two; the other worker is the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.loss import postponed_mean
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.patching import Patches

CPU = torch.device("cpu")
COUNT, INSIDE, PLACE, MARK = range(4)  # the numbers of an exchange; the squares of the last two follow
LABELS = torch.tensor([0, 2, -100])  # of which two count
OTHERS = 5.0  # what counts in the rows of the other worker
SCORES = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Other:
    """The other worker: comes to the same places, and has `OTHERS` rows that count at each mean.

    Attributes:
        exchanges: What the worker under test gave, an exchange each.
        answer: Gives the numbers of the other worker, without squares; called with those of the worker under test.
    """

    def __init__(self) -> None:
        self.exchanges: list[list[float]] = []
        self.answer: Callable[[list[float]], list[float]] = _same

    def all_reduce(self, numbers: Tensor, group: object = None) -> None:
        own = numbers.tolist()
        self.exchanges.append(own)
        count, inside, place, mark = self.answer(own)
        numbers += torch.tensor([count, inside, place, mark, place**2, mark**2], dtype=numbers.dtype)


def _same(own: list[float]) -> list[float]:
    return [OTHERS if own[PLACE] else 0.0, *own[INSIDE : MARK + 1]]


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    other = Other()
    monkeypatch.setattr(dist, "all_reduce", other.all_reduce)
    return other


def split(mark: int = 0) -> GlobalReduction:
    return GlobalReduction(CPU, axis=Axis(0, 2, None), mark=lambda: mark, meets_failed=True)


def wanted(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, LABELS, reduction="sum") / (2 + OTHERS)


def gradient(loss: Callable[[Tensor], Tensor]) -> Tensor:
    scores = SCORES.clone().requires_grad_(True)
    (found,) = torch.autograd.grad(loss(scores), scores)
    return found


def test_the_denominator_of_the_last_mean_travels_with_the_news_that_the_forward_is_through(other):
    def loss(scores):
        with split(mark=3):
            return F.cross_entropy(scores, LABELS)

    torch.testing.assert_close(gradient(loss), gradient(wanted))
    ((count, inside, place, mark, *squares),) = other.exchanges
    assert (count, inside, mark) == (2, 0, 3) and place > 0
    assert squares == [place**2, 9]
    torch.testing.assert_close(loss(SCORES), wanted(SCORES))


@pytest.mark.parametrize(
    ("use", "exchanges"),
    [
        (lambda share: share, 1),
        (lambda share: share if share.requires_grad and share.shape == () and share.device == CPU else None, 1),
        (lambda share: share * 2, 2),
        (lambda share: torch.stack([share, share]).sum(), 2),
        (lambda share: share * (2.0 if share.item() > 0 else 1.0), 2),
        (lambda share: share.add_(1.0), 2),
        (lambda share: share + F.mse_loss(share, share), 3),  # the second mean is postponed, and used
    ],
)
def test_whoever_uses_a_mean_gets_its_value(other, use, exchanges):
    with split():
        found = use(F.cross_entropy(SCORES.clone().requires_grad_(True), LABELS))
    assert len(other.exchanges) == exchanges
    assert [given[INSIDE] for given in other.exchanges] == [1.0] * (exchanges - 1) + [0.0]
    torch.testing.assert_close(found, use(wanted(SCORES.clone().requires_grad_(True))))


def test_means_of_several_numbers_and_rounded_ones_do_not_wait(other):
    with split():
        means = SCORES.mean(0)
    with split():
        rounded = SCORES.bfloat16().mean()
    assert len(other.exchanges) == 4
    torch.testing.assert_close(means, SCORES.sum(0) / (3 + OTHERS))
    torch.testing.assert_close(rounded, (SCORES.bfloat16().float().sum() / (12 + OTHERS)).bfloat16())


def test_a_worker_that_is_through_answers_those_that_are_not(other):
    turns = iter([1.0, 1.0, 0.0])

    def answer(own):
        inside = next(turns)
        return [OTHERS if own[PLACE] else 0.0, inside, own[PLACE], own[MARK] if not inside else 0.0]

    other.answer = answer  # it uses its mean, and comes to another exchange, at a place that is no mean's
    with split(mark=9):
        share = F.cross_entropy(SCORES, LABELS)
    assert [given[COUNT] for given in other.exchanges] == [2, 0, 0]
    torch.testing.assert_close(share, wanted(SCORES))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda own: [OTHERS, 0.0, own[PLACE] + 1, own[MARK]], "over which losses"),
        (lambda own: [0.0, 0.0, 0.0, own[MARK]], "over which losses"),
        (lambda own: [OTHERS, 0.0, own[PLACE], own[MARK] + 1], "what the forward draws"),
    ],
)
def test_workers_that_took_different_ways_find_out(other, change, says):
    other.answer = change
    with pytest.raises(Diverged, match=says), split(mark=9):
        F.cross_entropy(SCORES, LABELS)
    assert len(other.exchanges) == 1


def test_a_forward_that_raises_tells_the_others_while_its_mean_waits(other):
    other.answer = lambda own: [OTHERS, 0.0, own[PLACE], 0.0]
    with pytest.raises(Diverged, match="raises an error"), split():
        F.cross_entropy(SCORES, LABELS)
        raise ValueError
    assert [given[MARK] for given in other.exchanges] == [2**16]


@contextmanager
def copied_tensors() -> Iterator[None]:
    """What the graph keeps is kept as a copy, as with `torch.autograd.graph.save_on_cpu` on a GPU."""
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.clone(), lambda one: one):
        yield


def test_gradients_do_not_depend_on_when_the_graph_is_copied(other):
    def loss(scores):
        with split(), copied_tensors():
            return F.cross_entropy(scores, LABELS)

    torch.testing.assert_close(gradient(loss), gradient(wanted))


def test_a_mean_can_be_derived_twice(other):
    def penalty(mean):
        def loss(scores):
            (first,) = torch.autograd.grad(mean(scores), scores, create_graph=True)
            return first.square().sum()

        return loss

    def mean(scores):
        with split():
            return F.cross_entropy(scores, LABELS)

    torch.testing.assert_close(gradient(penalty(mean)), gradient(penalty(wanted)))


def test_a_transform_inside_a_forward_gets_values(other):
    with split():
        found = torch.func.grad(lambda scores: F.cross_entropy(scores, LABELS))(SCORES)
        _, tangent = torch.func.jvp(lambda scores: F.cross_entropy(scores, LABELS), (SCORES,), (SCORES,))
    torch.testing.assert_close(found, gradient(wanted))
    torch.testing.assert_close(tangent, torch.func.jvp(wanted, (SCORES,), (SCORES,))[1], check_dtype=False)


@torch.jit.script
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_scripted_function_inside_a_forward_gets_values(other):
    patches = Patches()
    postponed_mean.install(patches)
    try:
        with split():
            found = doubled(F.cross_entropy(SCORES, LABELS))
    finally:
        patches.undo()
    torch.testing.assert_close(found, 2 * wanted(SCORES))
