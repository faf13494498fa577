"""Values that are here, promised, or still to be computed."""

from __future__ import annotations

import sys

import pytest
import torch

from moreh_ap.device.tensor import ACCELERATOR
from moreh_ap.device.values import Cell, Here, InFile, Later, View
from moreh_ap.protocol.tensor_source import TensorSource
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


def test_a_value_that_can_be_had_without_waiting_is_kept_here_and_others_are_not():
    value, _ = promise(torch.tensor(3.0))
    cell = Cell(value, ACCELERATOR)
    assert cell.settle() is value
    value.arrived = True
    settled = cell.settle()
    assert isinstance(settled, Here) and cell.value is settled and settled.tensor.item() == 3.0
    settled.tensor.add_(1)
    assert value.tensor.item() == 3.0, "another may have put off an operation on it"


def test_values_that_stay_are_not_moved_here_by_a_reader():
    stays = InFile((TensorSource("/no/such/file", "weight"),), (2,), torch.float32)
    cell = Cell(stays, ACCELERATOR)
    assert cell.settle() is stays and stays.ready()
    cast = stays.cast(torch.float16)
    assert cast.dtype == torch.float16 and cast.sources == stays.sources


def test_an_operation_that_is_put_off_is_done_once_when_its_inputs_are_there():
    first, _ = promise(torch.tensor(2.0))
    second, _ = promise(torch.tensor(5.0))
    calls = []

    def add(*tensors):
        calls.append(tensors)
        return sum(tensors)

    later = Later(add, (first, Later(add, (second,), {}), 1.0), {})
    assert not later.ready() and calls == []
    first.arrived = True
    assert not later.ready() and calls == []
    second.arrived = True
    assert later.ready() and later.read().item() == 8.0 and later.read().item() == 8.0
    assert len(calls) == 2


def test_writing_a_view_writes_its_base():
    base = Cell(Here(torch.zeros(2, 3)), ACCELERATOR)
    View(base, lambda whole: whole[1]).write(torch.ones(3))
    assert base.value.read().tolist() == [[0, 0, 0], [1, 1, 1]]
    with pytest.raises(TypeError, match="Here values are replaced"):
        Here(torch.zeros(1)).write(torch.ones(1))


def test_users_of_a_cell_count_while_they_live():
    cell = Cell(Here(torch.zeros(1)), ACCELERATOR)
    mine = cell.new_user()
    assert not cell.has_others(mine)
    view = View(cell, torch.detach)
    assert cell.has_others(mine)
    del view
    assert not cell.has_others(mine)
