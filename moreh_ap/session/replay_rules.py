"""What workers that take over are told of the commands that those before them have answered, and how answers compare.

Decides which commands are not carried out again, and which differences rounding explains. Must not know when commands
are kept, nor how workers are replaced (`runtime/recovery`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from moreh_ap.local import logger
from moreh_ap.parallelizer.trial.row_comparison import TOLERANCE_BF16, TOLERANCE_FP32
from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.devices import DescribeDevice, ProbeDevice, ReportMemory, ReportSteps
from moreh_ap.protocol.messages.models import BuildModel
from moreh_ap.protocol.messages.optimizers import LoadOptimizer, StepOptimizer
from moreh_ap.protocol.messages.stream import Again, Batch, Synchronize
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, SavedTensor, TensorData
from moreh_ap.protocol.messages.traces import BeginTrace, EndTrace
from moreh_ap.protocol.tensor_source import TensorSource

Figures = tuple[tuple[torch.dtype, bytes], ...]
"""Values that workers have answered: dtype and bytes of each."""

_ONCE = (
    WriteCheckpoint,
    CheckFiles,
    DescribeDevice,
    ProbeDevice,
    ReportMemory,
    ReportSteps,
    BeginTrace,
    EndTrace,
)
"""What changes nothing that workers hold and is not the same at another time, or writes files of the script."""


class SessionReplayRules:
    """The rules of a session. Implements `ReplayRules`.

    Args:
        on_others: Called when other workers have taken over.
    """

    def __init__(self, on_others: Callable[[], object]) -> None:
        self._on_others = on_others

    def note(self, command: Any) -> tuple[int, Sequence[str]]:
        """Returns how many optimizer steps a command has, and the files that workers read because of it."""
        num_steps, files = 0, []
        for one in _each(command):
            kind = type(one)
            if kind is StepOptimizer:
                num_steps += 1
            elif kind in (BuildModel, ReadCheckpoint, LoadOptimizer):
                files += [source.file for source in _sources(one)]
        return num_steps, files

    def figures(self, command: Any, values: Sequence[Any]) -> Figures:
        """Returns the small tensors among the answers of all workers to a command."""
        found = []
        for answers in values:
            for answer in answers if type(command) is Batch else (answers,):
                if answer is not None:
                    found += [(leaf.dtype, leaf.data) for leaf in _leaves(answer) if _is_compared(leaf)]
        return tuple(found)

    def again(self, command: Any) -> Any:
        """Returns the command, with something that does nothing in place of what is done once."""
        if type(command) is not Batch:
            return Synchronize() if isinstance(command, _ONCE) else command
        commands = [Synchronize() if isinstance(one, _ONCE) else one for one in command.commands]
        return replace(command, commands=tuple(commands))

    def difference(self, before: Figures, after: Figures) -> str:
        """Returns how figures differ, empty if they are equal but for rounding."""
        if [dtype for dtype, _ in before] != [dtype for dtype, _ in after]:
            return f"{len(before)} values before, {len(after)} now, or of other types"
        for (dtype, old), (_, new) in zip(before, after):
            if old != new:
                found = _compare(dtype, old, new)
                if found:
                    return found
        return ""

    def others_took_over(self) -> None:
        """Tells the session that other workers have been told everything."""
        self._on_others()

    def say(self, line: str) -> None:
        """Prints a line of the log."""
        logger.say(line, logger.NOTICE)


def _each(command: Any) -> Sequence[Any]:
    commands = command.commands if type(command) is Batch else (command,)
    return [one.command if type(one) is Again else one for one in commands]


def _sources(command: BuildModel | ReadCheckpoint | LoadOptimizer) -> Iterator[TensorSource]:
    """Yields where in files the tensors of a command lie."""
    if isinstance(command, BuildModel):
        for sources in command.sources.values():
            yield from sources
        return
    if isinstance(command, ReadCheckpoint):
        values: list[Any] = list(command.values.values())
    else:
        values = [value for entries in command.state.values() for value in entries.values()]
    for value in values:
        if isinstance(value, SavedTensor):
            yield from value.sources


def _leaves(answer: Any) -> Sequence[Any]:
    if isinstance(answer, ForwardReply):
        return answer.leaves
    return answer if isinstance(answer, (list, tuple)) else (answer,)


def _is_compared(leaf: Any) -> bool:
    """Returns whether an answer has the values of a tensor, and few of them."""
    if not isinstance(leaf, (LeafReply, TensorData)) or leaf.dtype is None or leaf.data is None:
        return False
    return len(leaf.data) <= MAX_INLINE_BYTES


def _compare(dtype: torch.dtype, old: bytes, new: bytes) -> str:
    """Returns the difference of two values whose bytes differ; empty if only rounding explains it."""
    if len(old) != len(new):
        return f"{len(old)} bytes before, {len(new)} now"
    first, second = (torch.frombuffer(bytearray(data), dtype=dtype) for data in (old, new))
    if not dtype.is_floating_point:
        return f"{first.tolist()[:4]} before, {second.tolist()[:4]} now"
    wide, other = first.double(), second.double()
    both = wide.isfinite() & other.isfinite()
    if not torch.equal(wide.isfinite(), other.isfinite()):
        return f"{int(wide.isfinite().sum())} finite numbers before, {int(other.isfinite().sum())} now"
    largest = float(wide[both].abs().max()) if both.any() else 0.0
    difference = float((wide - other)[both].abs().max()) if both.any() else 0.0
    tolerance = TOLERANCE_BF16 if dtype in (torch.bfloat16, torch.float16) else TOLERANCE_FP32
    return f"they differ by {difference:g}, of {largest:g}" if difference > tolerance * largest else ""
