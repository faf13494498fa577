"""Numbers that come from the rows of a slice, with those of the whole batch beside them."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.row_dims.row_numbers import RowCount, RowNumber, row_sizes


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


def test_what_is_no_whole_number_is_that_of_this_worker():
    rows = RowNumber(4, 8)
    assert rows / 2 == 2.0 and 0.5 * rows == 2.0 and type(2.5 + rows) is float
    assert torch.zeros(rows).shape == (4,) and rows == 4 and list(range(rows)) == [0, 1, 2, 3]


def test_the_dim_with_rows_alone_knows_the_batch():
    sizes = row_sizes(torch.Size([4, 3]), 0, lambda number: 2 * number)
    assert type(sizes) is torch.Size and sizes == (4, 3) and sizes[0].everyone == 8 and type(sizes[1]) is int
    assert row_sizes(4, 0, lambda number: 2 * number).everyone == 8
