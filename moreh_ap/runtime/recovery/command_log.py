"""The commands that workers were told since they had nothing, or since a snapshot, for others that take over.

Decides how much is kept, when a snapshot is due, and when losses are too many. Must not know what a command means:
`ReplayRules` say that.

[Note: snapshots]
A snapshot is a command in a message like others, whose answers come later. Until all workers have answered it, and
each has its copy, commands of before stay: a worker that is lost meanwhile costs what it would have cost. Then one
message takes the place of all of them, and of the one with the snapshot in it: what makes the structure of models, what
restores the copy, and what followed the snapshot in its message.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from moreh_ap.protocol.encoding import Packed, WorkerTraceback
from moreh_ap.runtime.future import SentCommand
from moreh_ap.runtime.recovery.snapshot_timing import SnapshotTiming

MOST_BYTES = 1 << 30
"""Of all commands that are kept, batches included."""

MOST_STEPS = 500
"""So many steps are computed again at most."""

SNAPSHOT_BYTES = 1 << 28
"""A snapshot is taken once so many bytes of commands are kept, however few steps that is."""

MOST_LOSSES, LOSSES_WITHIN_S = 3, 600.0
"""More losses than this at one command, within so many seconds, are no coincidence: the command causes them."""


class Noted(NamedTuple):
    """What has to be known of a command that is kept.

    Attributes:
        num_steps: How many optimizer steps it has.
        files: Those that workers read because of it.
        has_snapshot: Whether workers copy in it what they hold.
    """

    num_steps: int
    files: tuple[str, ...] = ()
    has_snapshot: bool = False


class Taken(NamedTuple):
    """How a snapshot went.

    Attributes:
        problem: Why a worker has no copy; empty if all have.
        is_passing: Whether that may be otherwise at the next step.
        is_too_large: Whether there is no memory for copies.
        seconds: What the slowest worker took.
        since_s: Seconds since workers were asked for one before; 0 if they never were.
    """

    problem: str
    is_passing: bool = False
    is_too_large: bool = False
    seconds: float = 0.0
    since_s: float = 0.0


class ReplayRules(Protocol):
    """What the session knows of commands."""

    def note(self, command: Any) -> Noted:
        """Returns what has to be known of a command that is kept."""

    def next_snapshot(self) -> Any:
        """Returns a command that has workers copy what they hold; None where that is not possible."""

    def taken(self, command: Any, values: Sequence[Any]) -> Taken:
        """Returns how the workers' copies went that a command had them take."""

    def drop(self, command: Any, num_done: int | None) -> None:
        """Is told in order what a snapshot stands for, and how many commands in it were carried out (None: all)."""

    def from_snapshot(self, command: Any) -> Any:
        """Returns what is sent to other workers in place of all up to the snapshot in `command`, and of its rest."""

    def close(self) -> None:
        """Is called when nothing is kept any more."""

    def figures(self, command: Any, values: Sequence[Any]) -> Any:
        """Returns what is kept of a command's results, one a worker, to be compared with those of a replay."""

    def again(self, command: Any) -> Any:
        """Returns what is sent to other workers in place of a command that has been answered."""

    def difference(self, before: Any, after: Any) -> str:
        """Returns how figures of a replay differ from those of before; empty if only rounding explains it, or not."""

    def others_took_over(self) -> None:
        """Is called when other workers have been told everything."""

    def say(self, line: str) -> None:
        """Prints a line of the log."""


@dataclass
class Logged:
    """A command that was sent.

    Attributes:
        sent: The command, without its payload.
        is_each: Whether every worker got its own.
        num_steps: Optimizer steps in it.
        num_bytes: Its size.
        is_answered: Whether all workers have answered.
        figures: What is kept of the answers.
        error: The error in which it ended, if it did.
    """

    number: int
    epoch: int
    recoverable: bool
    origin: Any
    is_each: bool
    num_steps: int
    num_bytes: int
    is_answered: bool = False
    figures: Any = None
    error: BaseException | None = None


class CommandLog:
    """Commands in order, with the figures of their answers.

    The thread that submits commands adds them, in the worker group's lock; the one that receives answers does the rest.

    Args:
        rules: What is known of commands.

    Attributes:
        is_open: Whether commands are kept.
        why_closed: Why they are not kept any more; empty before the log is opened.
        wanted: A command that should go with the next one, if any: a snapshot is due.
    """

    def __init__(self, rules: ReplayRules) -> None:
        self.rules = rules
        self.is_open, self.why_closed = False, ""
        self.wanted: Any = None
        self._lock = threading.Lock()
        self._commands: dict[int, Logged] = {}
        self._num_bytes = self._num_steps = 0
        self._files: dict[str, tuple[int, ...]] = {}
        self._when_forgotten: list[Callable[[], object]] = []
        self._losses: dict[int, deque[float]] = {}
        self._timing = SnapshotTiming()
        self._takes_snapshots, self._snapshot_in, self._problem = True, 0, ""
        self._most_bytes = SNAPSHOT_BYTES  # are kept before a snapshot is due

    def open(self) -> None:
        """Keeps commands from now on; nothing happens where that was asked for before."""
        self.is_open = self.is_open or not self.why_closed

    def close(self, why: str) -> None:
        """Forgets all commands, and keeps none from now on."""
        if not self.is_open:
            return
        self.is_open, self.why_closed, self.wanted = False, why, None
        self._commands, self._files = {}, {}
        callbacks, self._when_forgotten = self._when_forgotten, []
        for callback in callbacks:
            callback()
        self.rules.close()

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once the log is closed; at once if it is not open."""
        if self.is_open:
            self._when_forgotten.append(callback)
        else:
            callback()

    def add(self, command: SentCommand) -> None:
        """Keeps a command that is about to be sent; closes the log where it would be too long."""
        noted = self.rules.note(command.origin)
        packed = [command.payload] if isinstance(command.payload, Packed) else command.payload
        num_bytes = sum(map(_num_bytes, packed))
        is_each = not isinstance(command.payload, Packed)
        logged = Logged(
            command.number, command.epoch, command.recoverable, command.origin, is_each, noted.num_steps, num_bytes
        )
        with self._lock:
            self._num_bytes += num_bytes
            self._num_steps += noted.num_steps
            for file in noted.files:
                self._files.setdefault(file, _identity(file))
            self._commands[command.number] = logged
        if noted.has_snapshot:
            self.wanted, self._snapshot_in = None, command.number
            self._timing.sent()
        elif noted.num_steps:
            self._timing.stepped(noted.num_steps)
        if self._num_steps > MOST_STEPS:
            self._close_full(f"more than {MOST_STEPS} steps would have to be computed again")
        elif self._num_bytes > MOST_BYTES:
            self._close_full(f"more than {MOST_BYTES >> 20} MiB of commands would have to be kept")
        elif self._takes_snapshots and not self._snapshot_in and self.wanted is None and self._is_due():
            self.wanted = self.rules.next_snapshot()
            self._takes_snapshots = self.wanted is not None

    def _is_due(self) -> bool:
        return self._timing.is_due() or self._num_bytes > self._most_bytes

    def _close_full(self, why: str) -> None:
        if self._problem:
            why += f" (no copy of what workers hold: {self._problem})"
        self.close(why)
        self.rules.say(f"a worker that is lost from now on ends the run: {why}")

    def answered(self, command: SentCommand, values: Sequence[Any], error: BaseException | None) -> None:
        """Records how a command ended."""
        logged = self._commands.get(command.number)
        if logged is None:
            return
        logged.is_answered, logged.error = True, error
        if error is None:
            logged.figures = self.rules.figures(logged.origin, values)
        if command.number == self._snapshot_in:
            self._snapshot_in = 0
            if error is None:
                self._snapshot_ended(logged, self.rules.taken(logged.origin, values))

    def _snapshot_ended(self, logged: Logged, taken: Taken) -> None:
        """Has the snapshot stand for all before it, if every worker has its copy. See [Note: snapshots]."""
        self._problem = taken.problem
        if taken.problem:
            self._timing.failed(taken.is_passing)
            self._most_bytes = self._num_bytes + SNAPSHOT_BYTES // 8
            if taken.is_too_large:
                self._takes_snapshots = False
                instead = f"a worker can be lost in the first {MOST_STEPS} steps only"
                self.rules.say(f"there is no memory for copies of what workers hold: {instead}")
            return
        self._timing.taken(taken.seconds, taken.since_s)
        self._most_bytes = SNAPSHOT_BYTES
        before = [one for number, one in self._commands.items() if number < logged.number]
        last: BaseException | None = None
        for one in before:
            self.rules.drop(one.origin, None if one.error is None else _num_done(one.error, last))
            last = one.error or last
        origin = self.rules.from_snapshot(logged.origin)
        noted = self.rules.note(origin)
        first = replace(logged, origin=origin, num_steps=noted.num_steps)
        with self._lock:
            after = {number: one for number, one in self._commands.items() if number > logged.number}
            self._commands = {logged.number: first, **after}
            self._num_bytes = sum(one.num_bytes for one in self._commands.values())
            self._num_steps = sum(one.num_steps for one in self._commands.values())
            files = {*noted.files, *(file for one in after.values() for file in self.rules.note(one.origin).files)}
            self._files = {file: found for file, found in self._files.items() if file in files}

    def answered_commands(self) -> list[Logged]:
        """Returns the commands that have been answered, oldest first: those behind them have not."""
        return [one for one in list(self._commands.values()) if one.is_answered]

    def why_not(self, number: int) -> str:
        """Returns why workers that were lost cannot be replaced; empty if they can.

        Args:
            number: The command at which they were lost.
        """
        if not self.is_open:
            return self.why_closed
        now_s = time.monotonic()
        losses = self._losses.setdefault(number, deque())
        losses.append(now_s)
        while now_s - losses[0] > LOSSES_WITHIN_S:
            losses.popleft()
        if len(losses) > MOST_LOSSES:
            return f"workers were lost {len(losses)} times at the same command"
        changed = [file for file, before in self._files.items() if _identity(file) != before]
        return f"{changed[0]} has been changed since workers read it" if changed else ""


def _num_done(error: BaseException, last: BaseException | None) -> int:
    """Returns how many commands of a message were carried out that ended in `error`, after one that ended in `last`."""
    cause = error.__cause__
    return cause.num_done if error is not last and isinstance(cause, WorkerTraceback) else 0


def _num_bytes(packed: Packed) -> int:
    beside = sum(len(one) if isinstance(one, (bytes, memoryview)) else one.num_bytes for one in packed.buffers)
    return len(packed.pickle) + beside


def _identity(file: str) -> tuple[int, ...]:
    """Returns what changes when a file is written again or replaced; empty if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
