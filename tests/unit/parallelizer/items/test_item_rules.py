"""What is learned of places in a forward where items meet."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.items.item_recorder import ItemRecorder
from moreh_ap.parallelizer.items.item_reduction import LARGEST, OWN, PER_ITEM, SUM, ItemRules
from moreh_ap.parallelizer.items.item_rules import find_counts, find_merge, find_rules, find_sizes
from moreh_ap.parallelizer.trial.dry_run import Refused

CPU = torch.device("cpu")


def items():
    torch.manual_seed(0)
    return [torch.randn(length, 3) for length in (4, 6, 3, 7, 5)]


def learn(forward, *, is_ragged=True, sizes=()) -> ItemRules:
    """Returns the rules of a forward of five items, of which the first two and the other three were run alone."""

    def run(some, totals):
        recorder = ItemRecorder(CPU, totals=totals)
        with recorder:
            forward(some)
        return recorder.places

    def note(some, totals=None):  # in a thread of its own, where the lines that lead to the forward are always the same
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run, some, totals).result()

    given = items()
    whole, (first, others) = note(given), (given[:2], given[2:])
    totals = find_sizes(whole, note(first), note(others), is_ragged=is_ragged)
    totals.update(find_counts(whole, note(first, totals), note(others, totals)))
    return find_rules(
        whole,
        note(first, totals),
        note(others, totals),
        totals=totals,
        items=(2, 3),
        sizes=set(sizes),
        counts=True,
    )


@pytest.mark.parametrize(
    ("forward", "rules"),
    [
        (lambda some: torch.cat(some).sum() / len(torch.cat(some)), [(SUM,)]),
        (lambda some: torch.cat(some).sum() / len(some), [(PER_ITEM,)]),
        (lambda some: torch.cat(some).mean(), [(SUM,)]),
        (lambda some: F.mse_loss(torch.cat(some), torch.cat(some)), [(SUM,)]),
        (lambda some: (torch.cat(some) > 0).sum(), [(SUM,)]),
        (lambda some: torch.cat(some).sum() / max(1, (torch.cat(some) > 0).sum().item()), [(SUM,)]),
        (lambda some: torch.zeros(len(some), 3, max(map(len, some))), [(OWN, LARGEST, LARGEST)]),
        (lambda some: [one.mean() / len(one) for one in some], []),
        (lambda some: torch.cat(some) / 255, []),
    ],
)
def test_what_a_number_is(forward, rules):
    assert list(learn(forward).numbers.values()) == rules


def test_as_many_boxes_as_items_may_be_either():
    rules = learn(lambda some: torch.cat(some).sum() / len(some), sizes=[(2, 3)])
    assert list(rules.numbers.values()) == [(SUM,)]


def test_equal_sizes_are_exchanged_only_where_items_differ():
    assert not learn(lambda some: torch.zeros(3, 8), is_ragged=False).numbers


def test_loops_over_items_draw_in_rounds():
    def forward(some):
        for one in some:
            torch.randperm(len(one))
            torch.rand(2)
        for one in some:
            torch.randn(len(one))

    rules = learn(forward)
    assert [len(one.sites) for one in rules.rounds] == [2, 1] and not rules.draws


def test_draws_for_all_rows_follow_their_number():
    (draws,) = learn(lambda some: F.dropout(torch.cat(some), 0.5)).draws.values()
    assert [draw.rows.dim for draw in draws if draw.rows is not None] == [0]


def test_draws_that_depend_on_values_are_refused():
    with pytest.raises(Refused):
        learn(lambda some: [torch.rand(2) for one in some if len(one) > 4])


def test_how_results_go_together():
    parts = [
        {"loss": torch.tensor(1.0), "found": [torch.zeros(2)]},
        {"loss": torch.tensor(2.0), "found": [torch.ones(3)]},
    ]
    whole = {"loss": torch.tensor(3.0), "found": [torch.zeros(2), torch.ones(3)]}
    merge = find_merge(whole, parts, [1, 1], 1e-5)
    assert [one.kind for one in merge.parts] == ["share", "items"]
    assert find_merge(torch.arange(3.0), [torch.tensor([0.0]), torch.tensor([1.0, 2.0])], [1, 1], 1e-5).kind == "rows"
    with pytest.raises(Refused, match="depends on the other items"):
        find_merge([torch.zeros(2), torch.ones(2)], [[torch.zeros(2)], [torch.zeros(2)]], [1, 1], 1e-5)
