"""Largest and smallest numbers of a batch from those of each worker's rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.parallelizer.loss.extremes import extreme_of
from moreh_ap.parallelizer.loss.mean_functions import BOTH, SMALLEST

BATCH = {
    "whole numbers": torch.tensor([[3, -7, 5], [9, 0, -1]]),
    "fractions": torch.tensor([[0.5, -2.25, 1.0], [-8.0, 3.0, 0.0]]),
    "large whole numbers": torch.tensor([[2**52, 1, 0], [2**52 + 1, -(2**52), 5]]),
}
WHOLE = [torch.max, torch.min, Tensor.max, Tensor.min, Tensor.amax, Tensor.amin, torch.aminmax, Tensor.aminmax]


def everyone_s(func, batch):
    """What `extreme_of` gives on the worker with the first row, of whose numbers another one has the second."""
    first, second = (func(rows) for rows in batch.split(1))

    def largest(own):
        if func in BOTH:
            return torch.maximum(own, torch.stack([-second.min, second.max]).to(torch.float64))
        return torch.maximum(own, (-second if func in SMALLEST else second).to(torch.float64))

    return extreme_of(func, first, largest)


@pytest.mark.parametrize("batch", BATCH.values(), ids=BATCH)
@pytest.mark.parametrize("func", WHOLE, ids=lambda func: func.__name__)
def test_the_extremes_of_all_rows_in_their_dtype(func, batch):
    wanted, found = func(batch), everyone_s(func, batch)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype
    else:
        assert type(found) is type(wanted)
        assert torch.equal(found.min, wanted.min) and torch.equal(found.max, wanted.max)
        assert found.max.dtype == wanted.max.dtype
