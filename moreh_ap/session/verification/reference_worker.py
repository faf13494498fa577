"""One more worker, which executes the commands of the others alone, as one device does.

Decides which commands it gets, and in which form. Must not know what is compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.calls import Forward, ReadInputGradients, ReadOutputGradient, ReadOutputs
from moreh_ap.protocol.messages.checkpoints import CheckFiles, WriteCheckpoint
from moreh_ap.protocol.messages.devices import DescribeDevice, ProbeDevice, ReportMemory, ReportSteps
from moreh_ap.protocol.messages.models import BuildModel, ReadObjects
from moreh_ap.protocol.messages.optimizers import DescribeOptimizer
from moreh_ap.protocol.messages.row_shards import ReadRowShard
from moreh_ap.protocol.messages.state import ReadState, WriteState
from moreh_ap.protocol.messages.stream import Batch, Synchronize
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.runtime.future import Reply
from moreh_ap.runtime.worker_group import MakeLauncher, WorkerGroup

ONE_DEVICE = Plan(replicate=1)

_ONLY_ANSWERED = {
    CheckFiles,
    DescribeDevice,
    DescribeOptimizer,
    ProbeDevice,
    ReadInputGradients,
    ReadObjects,
    ReadOutputGradient,
    ReadOutputs,
    ReadRowShard,
    ReadState,
    ReportMemory,
    ReportSteps,
    Synchronize,
    WriteCheckpoint,
}
"""Commands that change nothing in a worker: what the script wants to know, the others answer."""


class ReferenceFailed(Exception):
    """The reference worker raised an error, which is the cause, or could not be started."""


@contextmanager
def _failing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any class: workers raise the errors of the model's code
        raise ReferenceFailed(f"{type(error).__name__}: {error}") from error


class Told:
    """The promise of what the reference worker answers to one message."""

    def __init__(self, reply: Reply | None, positions: dict[int, int]) -> None:
        self._reply, self._positions = reply, positions

    def answer(self, index: int) -> Any:
        """Returns the answer to command `index` of the message as the other workers got it; waits.

        Raises:
            ReferenceFailed: The worker raised an error, perhaps at an earlier command.
        """
        assert self._reply is not None
        with _failing():
            return self._reply.group.answers(self._reply)[0][self._positions[index]]


class ReferenceWorker:
    """Executes commands on one device.

    Args:
        start: Starts the worker process and returns at once.
    """

    def __init__(self, start: Callable[[], WorkerGroup]) -> None:
        self._group = start()

    def tell(self, commands: Sequence[Any]) -> Told:
        """Sends the commands of the other workers; waits only for models, which are read from temporary files."""
        forms = [(index, form_for_one(command)) for index, command in enumerate(commands)]
        told = [(index, form) for index, form in forms if form is not None]
        with _failing():
            reply = self._group.submit(Batch(tuple(form for _, form in told))) if told else None
        answers = Told(reply, {index: position for position, (index, _) in enumerate(told)})
        for index, form in told:
            if isinstance(form, BuildModel):
                answers.answer(index)
        return answers

    def ask(self, command: Any) -> Any:
        """Returns the answer to a command of its own; waits.

        Raises:
            ReferenceFailed: The worker raised an error, perhaps at an earlier command.
        """
        with _failing():
            return self._group.answers(self._group.submit(command))[0]

    def read(self, refs: tuple[StateRef, ...]) -> list[Tensor]:
        """Returns the values of state tensors, on the CPU. Waits."""
        return [data.tensor() for data in self.ask(ReadState(refs))]

    def write(self, values: dict[StateRef, Tensor]) -> None:
        """Sets state tensors; does not wait."""
        with _failing():
            self._group.submit(WriteState({ref: TensorData.of(tensor) for ref, tensor in values.items()}))

    def close(self) -> None:
        """Ends the worker process."""
        self._group.close()


def form_for_one(command: Any) -> Any | None:
    """Returns a command as one device executes it; None if it would change nothing there."""
    if type(command) in _ONLY_ANSWERED:
        return None
    if isinstance(command, BuildModel):
        return replace(command, plan=str(ONE_DEVICE), example=None)
    if isinstance(command, Forward):
        return replace(command, expected=None)  # how the others share the batch
    return command


def visible_device(num_workers: int, num_gpus: int, names: str) -> str:
    """Returns the GPU of the reference worker: one that no other worker has, or else the first, which it shares.

    Args:
        num_workers: Number of the other workers, which have the first GPUs.
        num_gpus: Number of GPUs that this process sees.
        names: CUDA_VISIBLE_DEVICES; empty: all.
    """
    visible = [name.strip() for name in names.split(",") if name.strip()] or [str(index) for index in range(num_gpus)]
    return (visible[num_workers:] or visible or ["0"])[0]


def start(
    num_workers: int,
    device_type: str,
    threads: int,
    num_gpus: int,
    imports: Sequence[str],
    make_launcher: MakeLauncher | None = None,
) -> WorkerGroup:
    """Starts the worker process and returns at once.

    Args:
        num_workers: Number of the other workers.
        device_type: "cuda" or "cpu".
        threads: Threads of its mathematics.
        num_gpus: Number of GPUs that this process sees.
        imports: Modules to import early.
        make_launcher: What starts it where the other workers are on several hosts.
    """
    return WorkerGroup(
        1,
        device_type=device_type,
        threads_per_worker=threads,
        preimport=("moreh_ap.runtime.worker.executor", *imports),
        visible_devices=visible_device(num_workers, num_gpus, os.environ.get("CUDA_VISIBLE_DEVICES", "")),
        make_launcher=make_launcher,
        shares_memory=make_launcher is None,
    )
