"""A worker's numbers and those of another, which is played by the test: what a forward goes on with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.forward import EagerForward, reducing
from moreh_ap.parallelizer.items import item_reduction
from moreh_ap.parallelizer.items.item_reduction import LARGEST, OWN, PER_ITEM, SUM, ItemReduction, ItemRules
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.loss.loss_reduction import GlobalReduction
from moreh_ap.parallelizer.mesh import Axis

CPU = torch.device("cpu")
SITE = 77
FAILED = 2**16


class Other:
    """The other worker: answers every exchange, as this one does unless told otherwise."""

    def __init__(self) -> None:
        self.exchanges: list[list[float]] = []
        self.answer: Callable[[list[float]], list[float]] = lambda own: own

    def gather(self, everyone: torch.Tensor, own: torch.Tensor, group: object = None) -> None:
        self.exchanges.append(own.tolist())
        answer = self.answer(own.tolist())
        everyone.copy_(torch.tensor([*own.tolist(), *answer], dtype=own.dtype))

    def gives(self, *numbers: float, site: float | None = None, mark: float | None = None) -> None:
        def answer(own: list[float]) -> list[float]:
            found = [own[0] if site is None else site, own[1] if mark is None else mark, *numbers]
            return found + [0.0] * (len(own) - len(found))

        self.answer = answer


@pytest.fixture
def other(monkeypatch) -> Other:
    other = Other()
    monkeypatch.setattr(item_reduction, "all_gather", other.gather)
    return other


def reduction(rules: ItemRules | None = None, **changes: object) -> ItemReduction:
    return ItemReduction(
        CPU, axis=Axis(0, 2, None), rules=rules or ItemRules(), draws_together=False, meets_failed=True, **changes
    )


def knowing(*rules: str, what: str = "mean") -> ItemReduction:
    return reduction(ItemRules({(SITE, 0): rules}))


def test_numbers_are_joined_as_their_rules_say(other):
    other.gives(10.0, 5.0, 7.0)
    assert list(knowing(SUM, LARGEST, OWN).numbers_at("size", SITE, [1.0, 6.0, 3.0])) == [11.0, 6.0, 3.0]
    assert other.exchanges == [[SITE, 0.0, 1.0, 6.0, 3.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("rules", [{}, {(SITE, 1): (SUM,)}, {(SITE, 0): (SUM, OWN)}, {(SITE + 1, 0): (SUM,)}])
def test_where_nothing_was_learned_nothing_is_exchanged(other, rules):
    assert list(reduction(ItemRules(rules)).numbers_at("mean", SITE, [3.0])) == [3.0]
    assert not other.exchanges


def test_a_place_counts_how_often_it_was_reached(other):
    other.gives(4.0)
    forward = reduction(ItemRules({(SITE, 1): (SUM,)}))
    assert [list(forward.numbers_at("mean", SITE, [3.0])) for _ in range(3)] == [[3.0], [7.0], [3.0]]
    assert len(other.exchanges) == 1


def test_so_many_for_each_item_needs_no_exchange(other):
    forward = knowing(PER_ITEM)
    args, kwargs = forward.take(([torch.ones(2, 3 + number) for number in range(5)],), {})
    assert [one.shape[1] for one in args[0]] == [3, 4, 5] and not kwargs
    assert list(forward.numbers_at("divide", SITE, [6.0])) == [10.0]
    assert not other.exchanges


def test_a_batch_with_fewer_items_than_workers_diverges(other):
    with pytest.raises(Diverged, match="fewer items than there are devices"):
        reduction().take(([torch.ones(2, 3)],), {})


@pytest.mark.parametrize(("own", "others"), [(1.0, 5.0), (5.0, 1.0), (5.0, 0.0)])
def test_a_divisor_that_may_be_the_larger_of_one_and_a_count_diverges(other, own, others):
    other.gives(others)
    with pytest.raises(Diverged, match="one or less"):
        knowing(SUM).numbers_at("divide", SITE, [own])
    assert list(knowing(SUM).numbers_at("mean", SITE, [own])) == [own + others]


@pytest.mark.parametrize(
    ("differs", "reason"),
    [
        ({"site": SITE + 1}, "items decide where they meet others"),
        ({"site": 0.0, "mark": FAILED}, "raised an error, or drew"),
        ({"mark": 3.0}, "items decide what the forward draws"),
    ],
)
def test_workers_at_other_places_notice_it_in_that_exchange(other, differs, reason):
    other.gives(1.0, **differs)
    with pytest.raises(Diverged, match=reason), knowing(SUM) as forward:
        forward.numbers_at("mean", SITE, [2.0])
    assert len(other.exchanges) == 1, "nobody would come to a last one"


def test_a_forward_that_is_over_goes_to_a_last_exchange_with_its_mark(other):
    with reduction(mark=lambda: 5):
        assert not other.exchanges
    assert [one[:2] for one in other.exchanges] == [[0.0, 5.0]]


def test_a_forward_that_raises_tells_the_others(other):
    other.gives(1.0, site=SITE, mark=0.0)  # it goes on, and is told in its next exchange
    with pytest.raises(Diverged, match="raised an error"), reduction():
        raise ValueError("of the script")
    assert [one[:2] for one in other.exchanges] == [[0.0, FAILED]]


def test_counts_and_sizes_in_a_forward_are_those_of_all_items(other, monkeypatch):
    monkeypatch.setattr(item_reduction, "site_of_call", lambda: SITE)
    other.gives(4.0)
    mask = torch.tensor([True, True, False])
    with reduction(ItemRules({(SITE, 0): (SUM,), (SITE, 1): (LARGEST, OWN)})):
        count, padded = mask.sum(), torch.zeros(2, 3)
    assert count == 6 and count.dtype == torch.int64
    assert padded.shape == (4, 3)


def test_a_call_whose_tensors_have_rows_exchanges_nothing(other):
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    call = Call(
        model, "split", CPU, axis=Axis(0, 2, None), kinds=("rows",), means=False
    )  # as the split check leaves it
    assert type(reducing(call)) is GlobalReduction
    done = EagerForward(call, (x,), {})
    assert torch.equal(done.outputs[0], model(x).detach())
    assert not other.exchanges and not dist.is_initialized(), "any other collective would raise"


def test_whole_numbers_are_left_alone_if_the_rules_say_so(other):
    mask = torch.tensor([True, True])
    with reduction(ItemRules({(SITE, 0): (SUM,)}, counts=False)):
        assert mask.sum() == 2
    assert [one[0] for one in other.exchanges] == [0.0], "the last one alone"
