"""What a worker does with a message of several commands of which one raises."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from moreh_ap.errors import NotComputedError, UnsupportedError
from moreh_ap.protocol.encoding import capture_failure, restore_failure
from moreh_ap.protocol.messages.models import ChangeModule
from moreh_ap.protocol.messages.state import ReadState
from moreh_ap.protocol.messages.stream import Again, Batch, DefineList, ImportModules
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker.executor import WorkerExecutor

MISSING = ReadState((StateRef("model7", "param", "weight"),))


@pytest.fixture
def executor():
    made = WorkerExecutor(0, 1, "cpu")
    yield made
    made._patches.undo()


def test_how_many_commands_were_executed_travels_with_the_error(executor):
    with pytest.raises(TypeError, match="unknown command") as raised:
        executor.execute(Batch((ImportModules(()), DefineList(1, ()), "unknown")))
    failure = capture_failure(raised.value, 0)
    assert failure.num_done == 2 and restore_failure(failure).__cause__.num_done == 2


def test_what_is_missing_after_an_error_says_so_and_before_one_has_its_name(executor):
    with pytest.raises(KeyError, match="model7"):
        executor.execute(Batch((MISSING,)))
    with pytest.raises(TypeError):
        executor.execute(Batch(("unknown",)))
    for _ in range(2):
        with pytest.raises(NotComputedError, match="the workers had raised TypeError: unknown command str"):
            executor.execute(Batch((MISSING,)))


def test_what_is_sent_again_and_has_nothing_to_be_about_is_left_out(executor):
    with pytest.raises(TypeError):
        executor.execute(Batch(("unknown",)))
    lost = Again(ChangeModule("model7", (("", "gain", b""),)))
    assert executor.execute(Batch((lost, ImportModules(())))) == [None, None]


def test_modules_are_imported_with_the_variables_that_the_script_has_set(executor, monkeypatch, tmp_path):
    (tmp_path / "reads_its_backend.py").write_text("import os; BACKEND = os.environ['MADE_UP_BACKEND']")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MADE_UP_BACKEND", "another")
    executor.execute(Batch((ImportModules(("reads_its_backend",), (("MADE_UP_BACKEND", "torch"),)),)))
    assert sys.modules.pop("reads_its_backend").BACKEND == "torch"


def test_the_arguments_of_the_script_are_those_of_the_worker(executor, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["worker"])
    executor.execute(Batch((ImportModules((), arguments=("train.py", "--gelu")), ImportModules(("math",)))))
    assert sys.argv == ["train.py", "--gelu"]


def test_an_attribute_that_only_the_scripts_parameter_has_is_refused_by_its_name(executor):
    layer = nn.Linear(2, 2)

    def read(found: object) -> object:
        return found.made_up_counter

    executor._handlers[str] = lambda command: read(layer.weight)
    with pytest.raises(UnsupportedError, match="reads made_up_counter of a parameter") as raised:
        executor.execute(Batch(("forward",)))
    assert raised.value.fix.startswith("module.made_up_counter = ...")
    executor._handlers[str] = lambda command: read(layer)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'made_up_counter'"):
        executor.execute(Batch(("forward",)))


def test_a_part_of_a_block_that_a_forward_uses_by_itself_is_refused_where_it_is_sharded(executor):
    def fail(message: str) -> None:
        raise RuntimeError(message)

    mixed = "aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before"
    executor._handlers[str] = lambda command: fail(mixed)
    with pytest.raises(UnsupportedError, match=r"a part of a block .* PyTorch: aten.mul.Tensor got mixed"):
        executor.execute(Batch(("forward",)))
    executor._handlers[str] = lambda command: fail("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        executor.execute(Batch(("forward",)))
