"""Of which kind the leaves of a result are that has more or fewer of them than before, and which are in it twice."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.call.execution import repeats_in
from moreh_ap.parallelizer.call.forward import kinds_in_order

LOSS, ROWS = torch.tensor(1.0), torch.zeros(4, 2)


def test_more_constants_beside_as_many_tensors():
    leaves = [torch.ones(()), 3, 1, 2, torch.ones(4)]
    assert kinds_in_order(("share", "const", "rows"), leaves, True) == ("share", "const", "const", "const", "rows")
    assert kinds_in_order(("const",) * 5, [1, 2], True) == ("const", "const")


@pytest.mark.parametrize(
    "known, leaves, is_gathered",
    [
        (("const",), [1, 2], False),  # each worker may have those of its rows
        (("rows",), [torch.ones(2), torch.ones(2)], True),
        (("count", "const"), [1], True),
    ],
)
def test_what_is_not_clear_is_refused(known, leaves, is_gathered):
    with pytest.raises(ExactnessError, match=f"returns {len(leaves)} values, and returned {len(known)} before"):
        kinds_in_order(known, leaves, is_gathered)


def test_caches_of_layers_that_were_not_dropped_have_rows():
    known = ("share", "rows", "rows", "rows", "rows")
    assert kinds_in_order(known, [LOSS, ROWS, ROWS], is_gathered=False) == ("share", "rows", "rows")
    assert kinds_in_order(known[1:], [ROWS] * 6, is_gathered=False) == ("rows",) * 6


def test_caches_say_of_each_layer_whether_it_was_dropped():
    known = ("share", "rows", "rows", "rows", "const")
    assert kinds_in_order(known, [LOSS, ROWS, None, None, ROWS, False], False) == (
        *("share", "rows", "const", "const"),
        *("rows", "const"),
    )
    assert kinds_in_order(known[:-1], [LOSS, ROWS, None], False) == ("share", "rows", "const")


@pytest.mark.parametrize(
    ("known", "leaves"),
    [
        (("share", "rows", "rows", "const"), [LOSS, ROWS, ROWS, 3, 4]),  # numbers may be those of rows
        (("share", "rows", "rows"), [ROWS, ROWS]),  # without the loss
        (("share", "rows", "rows"), [LOSS]),
        (("share", "rows", "same"), [LOSS, ROWS]),
        (("share", "share", "rows", "rows"), [LOSS, ROWS]),
    ],
)
def test_rows_that_may_be_others_are_refused(known, leaves):
    with pytest.raises(ExactnessError, match="returned"):
        kinds_in_order(known, leaves, is_gathered=False)


def test_tensors_that_are_in_a_result_twice_are_found_and_equal_constants_are_not():
    assert repeats_in([LOSS, ROWS, 3, LOSS, 3, ROWS, ROWS.clone(), LOSS]) == {3: 0, 5: 1, 7: 0}
    assert repeats_in([LOSS, ROWS, None]) == {}
