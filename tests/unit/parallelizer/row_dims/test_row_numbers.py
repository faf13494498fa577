"""Numbers that come from the rows of a slice, with those of the whole batch beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.observation.torch_calls import asks_for_sizes
from moreh_ap.parallelizer.row_dims.row_numbers import (
    RowCount,
    RowFloat,
    RowNumber,
    everyone_s,
    lengths_of_both,
    math_of_both,
    own_of,
    row_sizes,
)


def test_a_count_is_learned_as_a_multiple_of_the_rows():
    assert RowCount(0, 2, -1).of(8) == 15


def test_arithmetic_of_whole_numbers_goes_on_for_the_whole_batch():
    rows = RowNumber(4, 8)
    for found, own, everyone in (
        (60 + rows, 64, 68),
        ((60 + rows) % 64, 0, 4),
        (rows * rows, 16, 64),
        (3 - rows, -1, -5),
        (rows // 2 - 1, 1, 3),
        (64 % rows, 0, 0),
        (-rows, -4, -8),
    ):
        assert isinstance(found, RowNumber) and (found, found.everyone) == (own, everyone)


def test_fractions_go_on_for_the_whole_batch_too():
    rows = RowNumber(4, 8)
    for found, own, everyone in (
        (1 / rows, 0.25, 0.125),
        (rows**-1, 0.25, 0.125),
        (rows + 2.5, 6.5, 10.5),
        (1 / (rows**2 - rows), 1 / 12, 1 / 56),
        (-(rows * 0.5) % 3, 1.0, 2.0),
        (np.sqrt(rows), 2.0, 8**0.5),
    ):
        assert isinstance(found, RowFloat) and (found, found.everyone) == (own, everyone)
    assert type(own_of(1 / rows)) is float and everyone_s(3) == 3


def test_functions_of_the_module_math_know_the_whole_batch_for_a_time():
    rows, log = RowNumber(4, 8), math.log
    with math_of_both():
        found, ceiling = math.log(1000 * rows), math.ceil(rows / 3)
        assert type(math.log(4)) is float
    assert (found, found.everyone) == (log(4000), log(8000)) and (ceiling, ceiling.everyone) == (2, 3)
    assert math.log is log and type(math.log(rows)) is float


def test_what_is_no_arithmetic_is_that_of_this_worker():
    rows = RowNumber(4, 8)
    assert (np.ones(2) * rows).tolist() == [4.0, 4.0] and type(int(rows / 2)) is int
    assert type(0.5 * rows) is float  # a float takes any whole number for a plain one
    assert torch.zeros(rows).shape == (4,) and rows == 4 and list(range(rows)) == [0, 1, 2, 3]


def test_the_dim_with_rows_alone_knows_the_batch():
    sizes = row_sizes(torch.Size([4, 3]), 0, lambda number: 2 * number)
    assert type(sizes) is torch.Size and sizes == (4, 3) and sizes[0].everyone == 8 and type(sizes[1]) is int
    assert row_sizes(4, 0, lambda number: 2 * number).everyone == 8


class _FourOfNine(TorchFunctionMode):
    """Has four rows of nine."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        return row_sizes(answer, 0, lambda own: own // 4 * 9) if asks_for_sizes(func) else answer


def test_the_length_of_a_tensor_knows_the_rows_of_the_batch() -> None:
    """A place in a queue that begins anew behind its end: nine rows behind place 6 of 12 end at 3, four at 10."""
    tensor = torch.zeros(4, 2)
    with lengths_of_both(), _FourOfNine():
        place = (6 + len(tensor)) % 12
        assert len([1, 2]) == 2
        with pytest.raises(TypeError):
            len(torch.zeros(()))
    assert (own_of(place), everyone_s(place)) == (10, 3)
    with _FourOfNine():
        assert type(len(tensor)) is int
