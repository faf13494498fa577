"""Which maxima and minima are those of all whole numbers in a tensor."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.loss.mean_functions import EXTREMES, SMALLEST, is_extreme

LENGTHS = torch.tensor([3, 5, 4])


@pytest.mark.parametrize(
    ("args", "kwargs", "wanted"),
    [
        ((LENGTHS,), {}, True),
        ((LENGTHS.int(),), {}, True),
        ((LENGTHS, 0), {}, False),
        ((LENGTHS,), {"dim": 0}, False),
        ((LENGTHS, LENGTHS), {}, False),
        ((LENGTHS.float(),), {}, False),
        ((LENGTHS > 3,), {}, False),
        ((LENGTHS[0],), {}, False),
    ],
)
def test_an_extreme_is_one_number_of_a_whole_tensor(args, kwargs, wanted):
    assert is_extreme(args, kwargs) is wanted


def test_minima_are_extremes():
    assert {torch.min, torch.Tensor.amin} <= SMALLEST < EXTREMES
