"""Numbers that Python and NumPy draw for one row after the other: told from coins, and shared among workers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from moreh_ap.parallelizer.observation.call_sites import FORWARD
from moreh_ap.parallelizer.rng.host_draws import HostDrawRecorder, SharedHostDraws, row_draws_of
from moreh_ap.parallelizer.rng.policy import streams_untouched
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.parallelizer.rng.turns import KnownTurns


@pytest.fixture(autouse=True)
def leave_streams_alone():
    with streams_untouched(None):
        yield


run = eval("lambda forward, *arguments: forward(*arguments)", {"__name__": FORWARD})
"""Calls a forward as the package does: lines that lead there are no part of a place in it."""


def seed() -> None:
    random.seed(3)
    np.random.seed(4)


def masks(rows: int) -> list[object]:
    """As SpecAugment: a number for the batch, then steps for each row; twice."""
    found = []
    for length in (9, 5):
        spans = int(np.random.rand(1).item() + 1.5)
        found.append([np.random.choice(np.arange(length), spans, replace=False).tolist() for _ in range(rows)])
    return found


def boxes(rows: int) -> list[object]:
    """Two functions a row, of both streams, and a coin behind them."""
    found = [(random.randint(0, 90), np.random.uniform(1, 2)) for _ in range(rows)]
    return [found, random.random() < 0.5]


def orders(rows: int) -> list[object]:
    """A function that writes to its argument."""
    found = []
    for _ in range(rows):
        order = list(range(6))
        random.shuffle(order)
        found.append(order)
    return [found]


def record(forward: Callable[..., object], *arguments: object) -> list:
    seed()
    with HostDrawRecorder() as recorder:
        run(forward, *arguments)
    return recorder.drawn


def learn(forward: Callable[[int], object], rows: int = 1) -> tuple:
    return row_draws_of(record(forward, rows), record(forward, 2 * rows), rows)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("forward", "sizes"), [(masks, [1]), (boxes, [2]), (orders, [1])])
def test_each_part_draws_what_one_device_draws_for_its_rows(forward, sizes, rows):
    blocks = learn(forward, rows)
    assert [len(block.calls) for block in {block.place: block for block in blocks}.values()] == sizes
    seed()
    wanted, after = forward(7), (random.random(), np.random.rand())
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        seed()
        with SharedHostDraws(blocks, Share(start, stop, 7)):
            got = run(forward, stop - start)
        assert got == [one[start:stop] if isinstance(one, list) else one for one in wanted]
        assert (random.random(), np.random.rand()) == after


def test_the_functions_are_those_of_the_libraries_afterwards():
    before = random.random, np.random.choice
    learn(masks)
    assert (random.random, np.random.choice) == before


def test_a_block_that_is_computed_again_draws_the_same():
    blocks = learn(orders)
    seed()
    shared = SharedHostDraws(blocks, Share(2, 4, 5))
    with shared:
        first = run(orders, 2)
    seed()
    with shared.again():
        second = run(orders, 2)
    assert first == second


def own_lengths(rows: int) -> None:
    for row in range(rows):
        np.random.randint(0, 5 + row)


def by_layer(rows: int) -> None:
    for _ in range(2):
        for _ in range(rows):
            random.random()


def one_more(rows: int) -> None:
    for _ in range(rows + 1):
        random.random()


@pytest.mark.parametrize("forward", [own_lengths, by_layer, one_more, lambda rows: random.random()])
def test_what_is_not_drawn_for_each_row_in_turn_is_not_shared(forward):
    assert learn(forward) == ()


def spans(lengths: list[int]) -> list[object]:
    """As SpecAugment with a mask: a number for the batch, then steps among those that each row has, then a coin."""
    number = int(np.random.rand(1).item() + 1.5)
    found = [np.random.choice(np.arange(length), number, replace=False).tolist() for length in lengths]
    return [found, random.random()]


def test_rows_with_arguments_of_their_own_draw_in_turn():
    lengths = [9, 5, 7, 6, 8]
    blocks = row_draws_of(record(spans, lengths[:1]), record(spans, lengths[:2]), in_turn=True)
    assert [(len(block.calls), block.in_turn) for block in blocks] == [(1, True)]
    seed()
    wanted, after = spans(lengths), (random.random(), np.random.rand())
    turns = KnownTurns()
    for start, stop in ((0, 5), (0, 2), (2, 3), (3, 5)):  # the first one finds out where each row begins
        seed()
        turns.restart()
        shared = SharedHostDraws(blocks, Share(start, stop, 5), turns)
        with shared:
            got = run(spans, lengths[start:stop])
        assert got == [wanted[0][start:stop], wanted[1]]
        assert (random.random(), np.random.rand()) == after
        seed()
        with shared.again():
            assert run(spans, lengths[start:stop]) == got


@pytest.mark.parametrize("forward", [by_layer, one_more, lambda rows: random.random()])
def test_what_is_not_drawn_for_each_row_is_not_drawn_in_turn(forward):
    assert row_draws_of(record(forward, 1), record(forward, 2), in_turn=True) == ()


def test_workers_whose_rows_get_other_arguments_have_other_marks():
    """What a row draws may depend on its values, which differ between workers."""
    marks, blocks = [], row_draws_of(record(sized, 1, 9), record(sized, 2, 9))
    for length in (9, 9, 8):
        seed()
        with SharedHostDraws(blocks, Share(0, 2, 4)):
            run(sized, 2, length)
        marks.append(SharedHostDraws.mark)
    assert marks[0] == marks[1] != marks[2] and marks[0]


def sized(rows: int, length: int) -> None:
    for _ in range(rows):
        np.random.randint(0, length)


def test_rows_of_one_worker_with_arguments_of_their_own_make_its_mark_its_own():
    blocks, marks = row_draws_of(record(varied, [9]), record(varied, [9, 9])), []
    for start in (0, 2):
        seed()
        with SharedHostDraws(blocks, Share(start, start + 2, 4)):
            run(varied, [9, 8])
        marks.append(SharedHostDraws.mark)
    assert marks[0] != marks[1]


def varied(lengths: list[int]) -> None:
    for length in lengths:
        np.random.randint(0, length)


def test_less_than_was_drawn_for_all_rows_makes_the_mark_its_own():
    blocks, marks = row_draws_of(record(sized, 1, 9), record(sized, 2, 9)), []
    for start in (0, 2):
        seed()
        with SharedHostDraws(blocks, Share(start, start + 2, 4)):
            run(sized, 1, 9)
        marks.append(SharedHostDraws.mark)
    assert marks[0] != marks[1]
