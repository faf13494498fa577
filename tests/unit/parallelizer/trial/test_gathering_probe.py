"""Numbers that follow the number of rows otherwise than as its multiples, as they are for a whole batch."""

from __future__ import annotations

import pytest

from moreh_ap.parallelizer.observation.recorded_calls import Called
from moreh_ap.parallelizer.row_dims.row_numbers import RowCount
from moreh_ap.parallelizer.row_dims.row_steps import REST, Step
from moreh_ap.parallelizer.trial.gathering_probe import interleaved, with_numbers_of


@pytest.mark.parametrize(("rows", "order"), [(6, [0, 3, 1, 4, 2, 5]), (5, [0, 3, 1, 4, 2])])
def test_rows_of_both_halves_of_a_batch_are_beside_each_other(rows: int, order: list[int]):
    assert interleaved(range(rows)) == order


STEPS = (Step("arange", follows=(RowCount(0, 1),)), Step("module Router"), Step("lt"), Step("add"))


def calls(rows: int, value: float = 0.5, inside: int = 1) -> list[Called]:
    """Returns what a forward of so many rows calls: labels, a module, a comparison with a capacity, a value added."""
    modules = [Called("linear", [None], 3 + place) for place in range(inside)]
    capacity, last = max(2, int(1.25 * rows / 4)), inside + 2
    return [
        Called("arange", [rows], 1),
        Called("module Router", [None], last),
        *modules,
        Called("lt", [None, capacity], last + 1),
        Called("add", [None, value], last + 2),
    ]


def test_a_capacity_is_that_of_the_batch():
    found = with_numbers_of(STEPS, calls(64, 0.7, inside=3), calls(4), calls(4, 0.6), 64)
    assert found == (STEPS[0], STEPS[1], Step("lt", follows=(RowCount(1, 0, 20),)), STEPS[3])
    assert found[2].is_of_one_size and not found[0].is_of_one_size


def test_a_number_that_is_another_for_as_many_other_rows_is_no_number_of_rows():
    batch, few = calls(64, inside=3), (calls(4), calls(4))
    others = calls(64, inside=3)
    assert with_numbers_of(STEPS, batch, *few, 64, [others])[2].follows == (RowCount(1, 0, 20),)
    others[-2].numbers[:] = [None, 19]
    assert with_numbers_of(STEPS, batch, *few, 64, [calls(64, inside=3), others])[2].follows == ()
    assert with_numbers_of(STEPS, batch, *few, 64, [others[:-1]]) is None, "values decide what is called"
    others[-2].numbers[:] = [None, 19, 2]
    assert with_numbers_of(STEPS, batch, *few, 64, [others]) is None, "or with how many arguments"


def test_numbers_that_all_rows_do_not_change_are_left_alone():
    assert with_numbers_of(STEPS, calls(6), calls(4), calls(4), 6) == STEPS


def test_what_follows_rows_as_a_multiple_of_few_only_is_that_of_the_batch():
    capped = calls(64)
    capped[0].numbers[:] = [48]
    found = with_numbers_of(STEPS[:1], capped[:1], calls(4)[:1], calls(4)[:1], 64)
    assert found == (Step("arange", follows=(RowCount(0, 0, 48),)),)


def test_a_batch_that_calls_other_functions_is_refused():
    assert with_numbers_of(STEPS, [*calls(64), Called("mul", [None], 9)], calls(4), calls(4), 64) is None
    assert with_numbers_of(STEPS, calls(64)[:-1], calls(4), calls(4), 64) is None
    assert with_numbers_of((*STEPS[:3], Step(REST)), calls(64)[:-1], calls(4), calls(4), 64) is not None
