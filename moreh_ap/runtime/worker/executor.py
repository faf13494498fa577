"""Dispatches a worker's commands to the subjects that execute them, by the class of the command.

Runs in the worker process, in the thread that also runs its collectives. All workers execute the same commands in the
same order. It must not know the engine that delivers commands, nor the controller that sends them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from moreh_ap.errors import NotComputedError, UnsupportedError
from moreh_ap.protocol.encoding import note_done
from moreh_ap.protocol.messages.checkpoints import ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.lasting_commands import MADE_AND_SET
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.protocol.messages.optimizers import StepOptimizer
from moreh_ap.protocol.messages.snapshots import RestoreSnapshot, TakeSnapshot
from moreh_ap.protocol.messages.state import ReadState, ReleaseState, RunOperation, WriteState
from moreh_ap.protocol.messages.stream import Again, Batch, DefineList, ImportModules
from moreh_ap.protocol.script_code import import_path
from moreh_ap.runtime.worker import worker_patches
from moreh_ap.runtime.worker.commands.checkpoint_commands import CheckpointCommands
from moreh_ap.runtime.worker.commands.device_commands import DeviceCommands
from moreh_ap.runtime.worker.commands.model_commands import ModelCommands
from moreh_ap.runtime.worker.commands.row_shard_commands import RowShardCommands
from moreh_ap.runtime.worker.commands.snapshot_commands import SnapshotCommands
from moreh_ap.runtime.worker.commands.state_commands import StateCommands
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.commands.trace_commands import TraceCommands
from moreh_ap.runtime.worker.worker_call import CallCommands
from moreh_ap.runtime.worker.worker_optimizer import OptimizerCommands

_TOUCHES_PARAMETERS = {
    ReadState,
    WriteState,
    ReadCheckpoint,
    WriteCheckpoint,
    RunOperation,
    StepOptimizer,
    TakeSnapshot,
    RestoreSnapshot,
}


class WorkerExecutor:
    """Executes commands on one device.

    Args:
        rank: This worker's number.
        world_size: How many workers there are.
        device_type: "cpu" or "cuda".
    """

    def __init__(self, rank: int, world_size: int, device_type: str) -> None:
        self._patches = worker_patches.install()
        self._tables = Tables(rank, world_size, device_type)
        self._handlers: dict[type, Any] = {
            Batch: self._batch,
            Again: self._again,
            ImportModules: self._import_modules,
            DefineList: self._define_list,
            ReleaseState: self._release_state,
        }
        subjects = (
            ModelCommands,
            CallCommands,
            OptimizerCommands,
            StateCommands,
            RowShardCommands,
            CheckpointCommands,
            DeviceCommands,
            SnapshotCommands,
        )
        for subject in subjects:
            self._handlers.update(subject(self._tables).handlers())
        for kind in MADE_AND_SET:
            if kind in self._handlers:
                self._handlers[kind] = self._noting(self._handlers[kind])
        self._handlers.update(TraceCommands(self._handlers, is_cuda=self._tables.device.is_cuda).handlers())

    def keep_copies_in(self, slots: Sequence[MemoryFile]) -> None:
        """Takes, before the first command, the memory for copies of this worker's state."""
        self._tables.copies = slots

    def execute(self, command: Any) -> Any:
        """Execute one command and return its answer.

        Raises:
            TypeError: No subject executes commands of this class.
            UnsupportedError: The user's model reads an attribute of a parameter that no worker has, or a parameter of a
                block of which each worker has a part.
            Exception: Whatever else the user's model or PyTorch raises.
        """
        kind = type(command)
        if kind not in self._handlers:
            raise TypeError(f"unknown command {kind.__name__}")
        if kind in _TOUCHES_PARAMETERS:
            for model in self._tables.models.values():
                if model.is_sharded:
                    model.settle()
        try:
            return self._handlers[kind](command)
        except AttributeError as error:
            if isinstance(error.obj, nn.Parameter):
                raise _missing_on_parameter(error) from error
            raise
        except RuntimeError as error:
            if type(error) is RuntimeError and "mixed torch.Tensor and DTensor" in str(error):
                raise _used_outside_of_its_block(str(error)) from error
            raise

    def _noting(self, execute: Any) -> Any:
        """Returns what executes a command that makes or sets something, and notes it once that is done."""

        def noted(command: Any) -> Any:
            answer = execute(command)
            self._tables.structure.add((command,))
            return answer

        return noted

    def _batch(self, command: Batch) -> list[Any]:
        answers: list[Any] = []
        try:
            for inner in command.commands:
                answers.append(self.execute(inner))  # how many there are counts where one raises
        except BaseException as error:  # of any class: it is raised again
            note_done(error, len(answers))
            self._tables.note_error(error, type(command.commands[len(answers)]), len(answers))
            raise
        return answers

    def _again(self, command: Again) -> None:
        with contextlib.suppress(NotComputedError):
            self.execute(command.command)

    def _import_modules(self, command: ImportModules) -> None:
        os.environ.update(command.environment)
        if command.folders:
            import_path.add_here(command.folders)
        sys.argv[:] = command.arguments or sys.argv
        for name in command.names:
            with contextlib.suppress(ImportError):  # a hint: building the model will say what is missing
                importlib.import_module(name)

    def _define_list(self, command: DefineList) -> None:
        self._tables.lists[command.list_id] = command.refs

    def _release_state(self, command: ReleaseState) -> None:
        for ref in command.refs:
            self._tables.temporaries.pop(ref, None)


def _missing_on_parameter(error: AttributeError) -> UnsupportedError:
    """Returns what to raise where code of the script reads an attribute that it has set on a parameter."""
    return UnsupportedError(
        f"A forward, or a hook inside of it, reads {error.name} of a parameter, and the workers' parameter has none: "
        "what a script or a library (opacus) sets on a parameter stays in the script.",
        allowed="What PyTorch keeps on a parameter, and attributes of modules.",
        fix=f"module.{error.name} = ...  # in place of an attribute of its parameter",
        link="docs/limits.md#parameters",
    )


def _used_outside_of_its_block(error: str) -> UnsupportedError:
    """Returns what to raise where a forward uses a part of a block, and no trial has seen it (`opened_blocks.py`)."""
    return UnsupportedError(
        "A forward calls a part of a block (block.norm(x)), or uses its weight, outside of the block's own forward, "
        "which the first call of its kind did not do, and each device has a part of the parameter. "
        f"PyTorch: {error.split(',')[0]}.",
        allowed="A forward that does so from its first call on, or a plan that has the model whole on each device.",
        fix='...(plan="replicate=2")  # with as many devices as you have',
        link="docs/limits.md#parameters",
    )
