"""Rows that normalise together: how much of a difference is rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.parallelizer.trial.joined_probe import is_rounding_of_buffer, perturbed

VARIANCE = torch.linspace(0.5, 1.5, 8)


@pytest.mark.parametrize(
    "got, changed, expected",
    [
        (VARIANCE + 1e-4, VARIANCE + 2e-5, True),  # inputs that differ in the last digits change it by as much
        (VARIANCE + 1e-4, VARIANCE, False),
        (VARIANCE + 0.05, VARIANCE + 0.04, False),  # where so much is rounding, nothing is shown
        (VARIANCE[:4], VARIANCE, False),
    ],
)
def test_a_buffer_may_differ_by_the_rounding_that_the_inputs_show(got: Tensor, changed: Tensor, expected: bool):
    assert is_rounding_of_buffer(got, VARIANCE, changed, tolerance=1e-5, noise=0.0) is expected


def test_a_running_mean_that_is_zero_but_for_rounding_is_compared_with_the_noise():
    zero = torch.full((4,), 1e-9)
    assert is_rounding_of_buffer(-zero, zero, zero, tolerance=1e-5, noise=1e-6)
    assert not is_rounding_of_buffer(-zero, zero, zero, tolerance=1e-5, noise=0.0)


def test_whole_numbers_among_fractions_are_no_fractions_for_the_trial():
    boxes = torch.tensor([[0.25, 0.5, 1.0], [-1.0, -1.0, -1.0]])
    changed = perturbed(boxes)
    assert ((changed != boxes) == torch.tensor([[True, True, False], [False] * 3])).all()
    torch.testing.assert_close(changed, boxes)
    counts = torch.arange(1.0, 5.0)  # nothing else could be changed
    assert (perturbed(counts) != counts).all()
