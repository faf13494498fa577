"""Whose fault an error in a trial is, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.trial.dry_run import Refused
from moreh_ap.parallelizer.trial.fault_finding import Finding, Outcome, try_out

CALL = Call(nn.Linear(1, 1), "unsplit", torch.device("cpu"), axis=Axis(0, 1, None))


def raising(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def nothing() -> None:
    """Runs without an error."""


def test_a_step_that_is_done():
    assert try_out(nothing, raising(AssertionError("not asked for")), CALL) == Finding(Outcome.DONE)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("rows meet"), "rows meet"),
        (ExactnessError("too many means", "fewer"), "the forward of a few rows raised ExactnessError: too many means"),
    ],
)
def test_what_a_trial_raises_on_purpose_is_nobodys_fault(error, reason):
    assert try_out(raising(error), raising(AssertionError("not asked for")), CALL) == Finding(Outcome.REFUSED, reason)


def test_an_error_that_one_device_raises_too_is_the_forwards():
    found = try_out(raising(KeyError("x")), raising(ValueError("of one device")), CALL)
    assert found == Finding(Outcome.CANNOT_RUN, "the forward of a few rows raised KeyError: 'x'")


@pytest.mark.parametrize("again", [nothing, raising(Refused("the forward changes a parameter"))])
def test_an_error_that_one_device_does_not_raise_is_ours(again):
    found = try_out(raising(KeyError("x")), again, CALL)
    assert (found.outcome, found.reason) == (Outcome.FAULT, "the forward of a few rows raised KeyError: 'x'")
    assert found.fault.startswith("Traceback") and found.fault.endswith("KeyError: 'x'\n")


@pytest.mark.parametrize("kind", [ValueError, AssertionError])
def test_a_check_of_the_forward_s_own_that_one_device_passes_is_nobodys_fault(kind):
    found = try_out(raising(kind("a size of (4, 2)")), nothing, CALL)
    assert found == Finding(Outcome.REFUSED, f"the forward of a few rows raised {kind.__name__}: a size of (4, 2)")
    alone = try_out(raising(kind("two rows or more")), raising(kind("two rows or more")), CALL)
    assert alone.outcome is Outcome.CANNOT_RUN, "more rows are tried"


def test_a_check_of_pytorch_may_be_ours():
    def run() -> None:
        nn.MultiheadAttention(3, 2)  # an assertion of PyTorch's

    assert try_out(run, nothing, CALL).outcome is Outcome.FAULT
