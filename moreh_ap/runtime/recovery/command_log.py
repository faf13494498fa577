"""The commands since the workers started, or since a snapshot, for workers that take over.

Decides how much is kept, when a snapshot is due, and when losses are too many. Must not know what a command means:
`ReplayRules` say that.

[Note: snapshots]
A snapshot is a command in a message like others, whose answers come later. Until all workers have answered it, and
each has its copy, commands of before stay: a worker that is lost meanwhile costs what it would have cost. Then one
message takes the place of all of them, and of the one with the snapshot in it: what makes the structure of models, what
restores the copy, and what followed the snapshot in its message.

[Note: little before the first copy]
A log of which no one knows whether it will be needed has to cost next to nothing in a run that is short, or does not
train. A frugal one keeps all commands from the beginning as long as they are few (`FEW_BYTES`, `FEW_COMMANDS`,
`MOST_STEPS`): lost workers can be replaced. When they are too many, it asks for a snapshot that may cost more than
others (`EARLY_COST`). Without that it keeps a command until it is answered, and of the answered ones only what makes
the structure of models. It is complete again once the first snapshot replaces all before it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moreh_ap.protocol.encoding import Packed, WorkerTraceback
from moreh_ap.runtime.future import SentCommand
from moreh_ap.runtime.recovery.copy_memory import CopyKeeper
from moreh_ap.runtime.recovery.losses import Losses
from moreh_ap.runtime.recovery.rules import ReplayRules, Taken
from moreh_ap.runtime.recovery.snapshot_timing import MOST_FRUGAL_STEPS, SnapshotTiming

MOST_BYTES = 1 << 30
"""Of all commands that are kept, batches included."""

MOST_STEPS = 500
"""So many steps are computed again at most, where commands are kept from the beginning."""

FEW_BYTES = 1 << 28
FEW_COMMANDS = 4096
"""Of a log of which no one knows whether it will be needed, before the first copy."""

FRUGAL_STEPS = 4 * MOST_FRUGAL_STEPS
"""The same where copies are taken as often as their cost allows: those between two copies, and more on their way."""

MOST_FAILED = 24
"""Where copies cost what they may, and so many in a row were not possible, no more are tried."""

INSTEAD = "Save checkpoints: MOREH_AUTOSAVE=folder does it by itself"
"""What a user can do where there is no room for copies."""

SNAPSHOT_BYTES = 1 << 28
"""A snapshot is taken once so many bytes of commands are kept, however few steps that is."""


@dataclass(slots=True)
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
        make_rules: Returns what is known of commands, once the first is noted.
        is_frugal: Whether only a few commands are kept before the first copy, see [Note: little before the first copy],
            and copies are taken only as often as their cost allows.

    Attributes:
        is_open: Whether commands are noted.
        rules: What is known of them, from then on.
        copies: Returns who keeps the copies of what workers hold; set by the worker group.
        is_complete: Whether all commands can be sent to other workers.
        why_closed: Why they are not noted any more; empty before the log is opened.
        bound: Why the log cannot be sent to workers under another plan; empty if it can.
        wanted: A command that should go with the next one, if any: a snapshot is due.
        num_copies: How many copies of what workers hold were complete.
    """

    def __init__(self, make_rules: Callable[[], ReplayRules], *, is_frugal: bool = False) -> None:
        self.rules: ReplayRules
        self.copies: Callable[[], CopyKeeper]
        self._make_rules, self._is_frugal = make_rules, is_frugal
        self.is_open, self.is_complete, self.why_closed, self.bound = False, False, "", ""
        self.wanted: Any = None
        self.num_copies = self._most_copy_bytes = 0
        self._lock = threading.Lock()
        self._commands: dict[int, Logged] = {}
        self._num_bytes = self._num_steps = self._last_number = 0
        self._files: dict[str, tuple[int, ...]] = {}
        self._when_forgotten: list[tuple[int, Callable[[], object]]] = []
        self._losses = Losses()
        self._timing = SnapshotTiming(is_frugal=is_frugal)
        self._takes_snapshots, self._snapshot_in, self._problem = True, 0, ""
        self._has_asked_early = False
        self._last_error: BaseException | None = None  # of a command that is not kept
        self._snapshot_bytes = MOST_BYTES if is_frugal else SNAPSHOT_BYTES
        self._most_bytes = self._snapshot_bytes  # are kept before a snapshot is due

    @property
    def has_copy(self) -> bool:
        """Whether a copy of the workers' state replaces earlier commands."""
        return self.num_copies > 0

    @property
    def keeps_values(self) -> bool:
        """Whether commands that are sent next may have to be sent again, with the values that they have now."""
        return self.is_complete or self._snapshot_in > 0 or self.wanted is not None

    def open(self) -> None:
        """Notes commands from now on; nothing happens where that was asked for before."""
        if not self.is_open and not self.why_closed:
            self.rules = self._make_rules()
            self.is_open = self.is_complete = True

    def close(self, why: str) -> None:
        """Forgets all commands, and notes none from now on."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open, self.is_complete, self.why_closed, self.wanted = False, False, why, None
            self._commands, self._files, self._snapshot_in = {}, {}, 0
        self._forgotten(self._last_number)
        self.copies().close()

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once no command of before is sent again; at once where none can be."""
        if self.keeps_values:
            self._when_forgotten.append((self._last_number, callback))
        else:
            callback()

    def _forgotten(self, up_to: int) -> None:
        """Calls what waits for commands up to a number to be forgotten."""
        waiting = self._when_forgotten
        self._when_forgotten = [one for one in waiting if one[0] > up_to]
        for number, callback in waiting:
            if number <= up_to:
                callback()

    def add(self, command: SentCommand) -> None:
        """Notes a command that is about to be sent; closes the log where it would be too long."""
        noted = self.rules.note(command.origin)
        is_each, num_bytes = not isinstance(command.payload, Packed), 0
        for packed in (command.payload,) if isinstance(command.payload, Packed) else command.payload:
            num_bytes += len(packed.pickle)
            for one in packed.buffers:
                num_bytes += len(one) if isinstance(one, (bytes, memoryview)) else one.num_bytes
        number, timing = command.number, self._timing
        logged = Logged(number, command.epoch, command.recoverable, command.origin, is_each, noted.num_steps, num_bytes)
        with self._lock:
            self._num_bytes += num_bytes
            self._num_steps += noted.num_steps
            for file in noted.files:
                self._files.setdefault(file, _identity(file))
            self._commands[number] = logged
            self._last_number = number
        if noted.has_snapshot:
            self.wanted, self._snapshot_in = None, number
            timing.sent()
        elif noted.num_steps:
            timing.stepped(noted.num_steps)
        most_steps = FRUGAL_STEPS if self._is_frugal else MOST_STEPS
        if self._is_frugal and self.is_complete and not (self.num_copies or self._snapshot_in or self.wanted):
            is_short = self._num_bytes <= FEW_BYTES and len(self._commands) <= FEW_COMMANDS
            if not is_short or self._num_steps > MOST_STEPS:
                self._is_too_long()
        if self.is_complete and self._num_steps > most_steps:
            self._close_full(f"more than {most_steps} steps would have to be computed again")
        elif self.is_complete and self._num_bytes > MOST_BYTES:
            self._close_full(f"more than {MOST_BYTES >> 20} MiB of commands would have to be kept")
        is_due = timing.num_steps >= timing.wanted or self._num_bytes > self._most_bytes
        if is_due and self.is_open and self._may_ask():
            self.wanted = self._next_snapshot()
            self._takes_snapshots = self.wanted is not None
            if self._is_frugal and not self._takes_snapshots:
                self.close("there is no memory that outlives a worker on this system")

    def _is_too_long(self) -> None:
        """Asks for the first snapshot, once; after that the log is not complete: the next answer drops those before."""
        may_ask = not self._has_asked_early and self._timing.most_s(is_early=True) > 0.0 and self._takes_snapshots
        if may_ask and self.rules.may_copy():
            self._has_asked_early = True
            self.wanted = self._next_snapshot(is_early=True)
        self.is_complete = self.wanted is not None

    def _next_snapshot(self, *, is_early: bool = False) -> Any:
        """Returns a command that has workers copy what they hold; None where there is no memory that outlives them."""
        self._most_copy_bytes = self._most_copy_bytes or self.copies().most_bytes()
        most_bytes, most_s = self._most_copy_bytes, self._timing.most_s(is_early=is_early)
        return self.rules.next_snapshot(most_bytes, most_s) if most_bytes else None

    def snapshot_after_error(self) -> Any:
        """Returns a message that has workers copy what they hold, all of which have ended in an error; None where there
        is no memory that outlives them. Once they have answered, the log is complete."""
        most_bytes = self.copies().most_bytes()
        return self.rules.snapshot_after_error(most_bytes) if most_bytes else None

    def _may_ask(self) -> bool:
        if not self._takes_snapshots or self._snapshot_in or self.wanted is not None:
            return False
        return self._timing.is_affordable() and self.rules.may_copy()

    def _close_full(self, why: str) -> None:
        if self._problem:
            why += f" (no copy of what workers hold: {self._problem})"
        self._close_and_say(why)

    def _close_and_say(self, why: str, instead: str = "") -> None:
        self.close(why)
        self.rules.say(f"a worker that is lost from now on ends the run: {why}{instead and f'. {instead}'}")

    def answered(self, command: SentCommand, values: Sequence[Any], error: BaseException | None) -> None:
        """Records how a command ended."""
        logged = self._commands.get(command.number)
        if logged is None:
            return
        logged.is_answered, logged.error = True, error
        if not self.is_complete and not 0 < self._snapshot_in <= command.number:
            self._drop_answered()  # it is not sent again
            return
        if error is None:
            logged.figures = self.rules.figures(logged.origin, values)
        if command.number == self._snapshot_in:
            self._snapshot_in = 0
            if error is None:
                self._snapshot_ended(logged, values)
            if not self.is_complete:
                self._drop_answered()

    def _drop_answered(self) -> None:
        """Keeps of commands that were answered only what makes the structure of models."""
        with self._lock:
            answered = [one for one in self._commands.values() if one.is_answered]
            for one in answered:
                del self._commands[one.number]
                self._num_bytes -= one.num_bytes
                self._num_steps -= one.num_steps
            if self._files:
                self._keep_files()
        self._drop(answered)
        if self._when_forgotten and answered:
            self._forgotten(answered[-1].number)

    def _drop(self, commands: Sequence[Logged]) -> None:
        """Gives the rules the commands that a snapshot replaces, or will."""
        for one in commands:
            self.rules.drop(one.origin, None if one.error is None else _num_done(one.error, self._last_error))
            self._last_error = one.error or self._last_error

    def _keep_files(self) -> None:
        """Forgets files that workers read because of commands of before. The caller holds the lock."""
        kept = {file for one in self._commands.values() for file in self.rules.note(one.origin).files}
        self._files = {file: found for file, found in self._files.items() if file in kept}

    def _snapshot_ended(self, logged: Logged, values: Sequence[Any]) -> None:
        """Drops what is before the snapshot, if every worker has its copy. See [Note: snapshots]."""
        taken, timing = self.rules.taken(logged.origin, values), self._timing
        self._problem = taken.problem
        if taken.problem:
            timing.failed(taken.is_passing, taken.needed_s)
            self._most_bytes = self._num_bytes + self._snapshot_bytes // 8
            if taken.is_too_large and (needed := self._why_no_room(taken)):
                self._takes_snapshots = False
                why = f"there is no memory for copies of what workers hold ({needed})"
                if self._is_frugal:
                    self._close_and_say(why, INSTEAD)
                    return
                self.rules.say(f"{why}: a worker can be lost in the first {MOST_STEPS} steps only. {INSTEAD}")
            elif self._is_frugal and timing.num_failed >= MOST_FAILED and not taken.needed_s:
                self._close_and_say(f"what workers hold cannot be copied: {taken.problem}")
            return
        timing.taken(taken.seconds, taken.since_s)
        if timing.costs_too_much:
            self._close_and_say(f"a copy of what workers hold takes {taken.seconds:.1f} s, too long for short steps")
            return
        self._most_bytes, self.bound = self._snapshot_bytes, taken.bound
        self._drop([one for number, one in self._commands.items() if number < logged.number])
        origin = self.rules.from_snapshot(logged.origin)
        figures = self.rules.figures(origin, self.rules.behind_snapshot(logged.origin, values))
        first = replace(logged, origin=origin, num_steps=self.rules.note(origin).num_steps, figures=figures)
        with self._lock:
            if not self.is_open:  # closed meanwhile, by what was sent
                return
            self._keep([first, *(one for number, one in self._commands.items() if number > logged.number)])
            self._keep_files()
            self.is_complete = True
            self.num_copies += 1
        if self._is_frugal and self.num_copies == 1:
            size = f"{taken.num_bytes / 2**20:.0f} MiB"
            self.rules.say_more(f"from now on a worker may be lost: copies of what workers hold are taken, {size} each")
        self._forgotten(logged.number - 1)

    def _why_no_room(self, taken: Taken) -> str:
        """Has the next copies be larger, or on disk, where they were too large; returns why they can be neither."""
        keeper = self.copies()
        if taken.largest_bytes > self._most_copy_bytes and keeper.fits(taken.num_bytes):
            self._most_copy_bytes = taken.largest_bytes
        elif self.has_copy:
            return "they have become larger than they may be"
        else:
            has_room, why = keeper.move_to_disk(taken.num_bytes, taken.largest_bytes)
            if not has_room:
                return why
            self.rules.copy_elsewhere()
            if why:
                which = "copies of what workers hold, by which a lost worker can be replaced,"
                self.rules.say(f"{which} are on disk: {why}")
            self._most_copy_bytes = 0
        self._timing.failed(is_soon=True)
        return ""

    def memory_differs(self) -> None:
        """Has it be found out once more how large copies may be: workers may be on other hosts."""
        self._most_copy_bytes = 0

    def answered_commands(self) -> list[Logged]:
        """Returns the commands that have been answered, oldest first: those behind them have not."""
        return [one for one in list(self._commands.values()) if one.is_answered]

    def keep_only(self, commands: Sequence[Logged]) -> None:
        """Keeps these commands, the oldest, perhaps changed: those behind them are going to be sent once more."""
        with self._lock:
            self._keep(commands)
            self._snapshot_in, self.wanted, self._most_copy_bytes = 0, None, 0

    def _keep(self, commands: Sequence[Logged]) -> None:
        self._commands = {one.number: one for one in commands}
        self._num_bytes = sum(one.num_bytes for one in commands)
        self._num_steps = sum(one.num_steps for one in commands)

    def why_not(self, number: int | None) -> str:
        """Returns why workers that were lost cannot be replaced; empty if they can.

        Args:
            number: The command at which they were lost; None: they had answered all.
        """
        if not self.is_open:
            return self.why_closed
        changed = [file for file, before in self._files.items() if _identity(file) != before]
        too_many = self._losses.why_too_many(number)
        return too_many or (f"{changed[0]} has been changed since workers read it" if changed else "")


def _num_done(error: BaseException, last: BaseException | None) -> int:
    """Returns how many commands of a message were carried out that ended in `error`, after one that ended in `last`."""
    cause = error.__cause__
    return cause.num_done if error is not last and isinstance(cause, WorkerTraceback) else 0


def _identity(file: str) -> tuple[int, ...]:
    """Returns what changes when a file is written again or replaced; empty if it cannot be read."""
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
