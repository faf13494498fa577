"""Which answered commands are sent again to workers that take over, and how their answers are compared.

Decides which commands are not executed again, which ones a snapshot replaces, and which differences rounding
explains. Must not know when commands are kept and snapshots taken, nor how workers are replaced (`runtime/recovery`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from moreh_ap.local import logger
from moreh_ap.parallelizer.rounding import TOLERANCE_BF16, TOLERANCE_FP32
from moreh_ap.protocol.messages.calls import ForwardReply
from moreh_ap.protocol.messages.checkpoints import CheckFiles, ReadCheckpoint, WriteCheckpoint
from moreh_ap.protocol.messages.devices import DescribeDevice, ProbeDevice, ReportMemory, ReportSteps
from moreh_ap.protocol.messages.lasting_commands import Structure
from moreh_ap.protocol.messages.models import BuildModel
from moreh_ap.protocol.messages.optimizers import LoadOptimizer, StepOptimizer
from moreh_ap.protocol.messages.snapshots import STILL_OPEN, TOO_LARGE, TOO_LONG, RestoreSnapshot, TakeSnapshot
from moreh_ap.protocol.messages.stream import Again, Batch, Synchronize
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, LeafReply, SavedTensor, TensorData
from moreh_ap.protocol.messages.traces import BeginTrace, EndTrace
from moreh_ap.protocol.tensor_source import TensorSource
from moreh_ap.runtime.recovery.rules import Noted, Taken
from moreh_ap.session.checkpoint import background_save
from moreh_ap.session.planning.oom_records import is_out_of_memory
from moreh_ap.session.replay.snapshot_slots import SnapshotSlots

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
    TakeSnapshot,
)
"""What changes nothing that workers hold and is not the same at another time, or writes files of the script."""

_READS_FILES = (BuildModel, ReadCheckpoint, LoadOptimizer)
_OF_TENSORS = (LeafReply, TensorData)


class SessionReplayRules:
    """The rules of a session. Implements `ReplayRules`.

    Args:
        on_others: Called when other workers have taken over.
    """

    def __init__(self, on_others: Callable[[], object]) -> None:
        self._on_others = on_others
        self._slots, self._structure = SnapshotSlots(), Structure()

    def note(self, command: Any) -> Noted:
        """Returns what has to be known of a command that is kept."""
        commands = command.commands if type(command) is Batch else (command,)
        num_steps, has_snapshot = 0, False
        files: tuple[str, ...] = ()
        for one in commands:
            kind = type(one)
            if kind is Again:
                one, kind = one.command, type(one.command)
            if kind is StepOptimizer:
                num_steps += 1
            elif kind is TakeSnapshot:
                has_snapshot = True
            elif kind in _READS_FILES:
                files += tuple(source.file for source in _sources(one))
        return Noted(num_steps, files, has_snapshot)

    # -- snapshots -------------------------------------------------------------------------------------------------

    def may_copy(self) -> bool:
        """Returns whether workers may copy their state: a copy cannot have files that are written in the background."""
        return not background_save.awaited

    def next_snapshot(self, most_bytes: int, most_s: float) -> Any:
        """Returns a command that has workers copy their state, within so many bytes and seconds."""
        return self._slots.next_copy(most_bytes, most_s)

    def copy_elsewhere(self) -> None:
        """Has the next copies be written into slots for which there is room; there is no complete one elsewhere."""
        self._slots.move()

    def snapshot_after_error(self, most_bytes: int) -> Any:
        """Returns a message that has workers copy their state after an error of all, and say what it has left."""
        return Batch((replace(self._slots.next_copy(most_bytes, math.inf), after_error=True),))

    def taken(self, command: Any, values: Sequence[Any]) -> Taken:
        """Returns the outcome of the snapshot that a command had all workers take."""
        place = _place_of_snapshot(command)
        answers = [one[place] for one in values]
        problem = next((one.problem for one in answers if one.problem), "")
        seconds, since_s = max(one.seconds for one in answers), max(one.since_s for one in answers)
        num_bytes = sum(one.num_bytes for one in answers)
        needed_s = max(one.seconds if one.problem == TOO_LONG else 0.0 for one in answers)
        is_too_large = problem.startswith(TOO_LARGE)
        bound = next((one.bound for one in answers if one.bound), "")
        is_passing, largest_bytes = problem == STILL_OPEN, max(one.num_bytes for one in answers)
        return Taken(problem, is_passing, is_too_large, seconds, since_s, num_bytes, needed_s, bound, largest_bytes)

    def drop(self, command: Any, num_done: int | None) -> None:
        """Keeps the parts of a command, of those that a snapshot replaces, that are sent again before it is restored.

        Args:
            command: The command.
            num_done: How many commands in it were carried out; None: all.
        """
        commands = list(_each(command))[:num_done]
        restored = [index for index, one in enumerate(commands) if type(one) is RestoreSnapshot]
        self._structure.add(commands[restored[-1] + 1 :] if restored else commands)  # what is before it is known

    def from_snapshot(self, command: Any) -> Any:
        """Returns what replacement workers get: it restores the snapshot in `command`, then does what follows it."""
        place = _place_of_snapshot(command)
        self.drop(replace(command, commands=command.commands[:place]), None)
        restore = self._slots.completed(command.commands[place])
        return Batch((*self._structure.commands(), restore, *command.commands[place + 1 :]))

    def behind_snapshot(self, command: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Returns of a command's results, one a worker, those of what follows the snapshot in it."""
        place = _place_of_snapshot(command)
        return [answers[place + 1 :] for answers in values]

    def complete_slot(self) -> int | None:
        """Returns the slot of the snapshot that replaces earlier commands; None without one."""
        return self._slots.complete

    def for_others(self, change: Callable[[Any], Any], of_workers: int) -> Callable[[Any], Any]:
        """Returns a function that adapts kept commands to workers under other plans.

        Args:
            change: Returns a command for them, itself if it does not depend on plans.
            of_workers: How many there were before, which have written snapshots.
        """
        self._structure.change(change)

        def changed(command: Any) -> Any:
            if type(command) is Batch:
                return replace(command, commands=tuple(map(changed, command.commands)))
            if type(command) is RestoreSnapshot and command.of_workers is None:
                return replace(command, of_workers=of_workers)
            return change(command)

        return changed

    def may_be_others(self, error: BaseException | None) -> bool:
        """Returns whether an error of some workers is one after which others may take over under another plan."""
        return isinstance(error, Exception) and is_out_of_memory(error)

    def figures(self, command: Any, values: Sequence[Any]) -> Figures:
        """Returns the small tensors among the answers of all workers to a command."""
        if type(command) is not Batch:
            values = [(answers,) for answers in values]
        found = []
        for answers in values:
            for answer in answers:
                if answer is None:  # most are
                    continue
                leaves = answer.leaves if isinstance(answer, ForwardReply) else answer
                for leaf in leaves if isinstance(leaves, (list, tuple)) else (leaves,):
                    if not isinstance(leaf, _OF_TENSORS) or leaf.dtype is None or leaf.data is None:
                        continue
                    if len(leaf.data) <= MAX_INLINE_BYTES:
                        found.append((leaf.dtype, leaf.data))
        return tuple(found)

    def again(self, command: Any) -> Any:
        """Returns the command, with `Synchronize` in place of commands that are executed once only."""
        if type(command) is not Batch:
            return Synchronize() if _is_done_once(command) else command
        commands = [Synchronize() if _is_done_once(one) else one for one in command.commands]
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
        """Notifies the session that all kept commands were sent to the replacement workers."""
        self._on_others()

    def say(self, line: str) -> None:
        """Prints a line of the log."""
        logger.say(line, logger.NOTICE)

    def say_more(self, line: str) -> None:
        """Prints a line of a detailed log."""
        logger.say(line, logging.DEBUG)


def _is_done_once(command: Any) -> bool:
    """Returns whether a command that was answered is left out: not one whose files those that were lost still wrote."""
    if type(command) is WriteCheckpoint and command.path in background_save.awaited:
        return False
    return isinstance(command, _ONCE)


def _place_of_snapshot(command: Batch) -> int:
    return next(index for index, one in enumerate(command.commands) if type(one) is TakeSnapshot)


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
