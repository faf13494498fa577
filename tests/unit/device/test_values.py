"""Values that are here, promised, or still to be computed."""

from __future__ import annotations

import sys

import pytest
import torch

from unit.device.samples import promise


def test_a_long_running_sum_of_arrived_promises_does_not_grow():
    total = torch.zeros((), device="cuda")
    for step in range(50):
        value, loss = promise(torch.tensor(float(step)))
        total = total + loss
        value.arrived = True
    depth, cell = 0, total._cell.value
    while getattr(cell, "_operation", None) is not None:
        cell, depth = cell._operation[1][0], depth + 1
    assert depth <= 2 and total.item() == sum(range(50))


@pytest.fixture
def shallow_stack():
    """Returns how deep Python's stack may become: enough for an operation, less than usual."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield 400
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("when", ["each arrives in time", "all arrive at the end"])
def test_a_running_total_may_be_as_long_as_a_training_run(when, shallow_stack):
    total = torch.zeros((), device="cuda")
    promises = []
    num_steps = shallow_stack + 200  # a read that goes back step by step must not recurse
    for step in range(num_steps):
        value, loss = promise(torch.tensor(float(step)))
        total += loss
        promises.append(value)
        if when == "each arrives in time" and step > 0:
            promises[step - 1].arrived = True
    for value in promises:
        value.arrived = True
    assert total.item() == sum(range(num_steps))
