"""Functions that a forward calls, and the numbers that they get: those that it has read from a tensor are left out."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.observation.recorded_calls import NumberRecorder


def numbers_of(forward, name):
    with NumberRecorder(torch.device("cpu")) as recorder:
        forward(torch.arange(12.0).view(4, 3))
    (found,) = [called.numbers for called in recorder.calls if called.name == name]
    return found


def test_numbers_of_rows_are_noted():
    assert numbers_of(lambda x: x.new_zeros(2 * len(x), 3), "new_zeros") == [None, 8, 3]


def test_numbers_that_were_read_are_not_whatever_was_computed_of_them():
    def split(x):
        counts = (x > 4).sum(0).tolist()
        x.flatten().split([counts[0] - 1, 1 + counts[1], 12 - counts[0] - counts[1]])

    def scaled(x):
        torch.full((2,), x.max().item() / 2)

    assert numbers_of(split, "split") == [None, None, None, None, 0]  # the tensor, what was read, and the dim
    assert numbers_of(scaled, "full") == [2, None]
