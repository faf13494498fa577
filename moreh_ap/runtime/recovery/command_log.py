"""The commands that workers were told since they had nothing, for others that take over.

Decides how much is kept, and when losses are too many. Must not know what a command means: `ReplayRules` say that.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.future import SentCommand

MOST_BYTES = 1 << 30
"""Of all commands that are kept, batches included."""

MOST_STEPS = 500
"""So many steps are computed again at most."""

MOST_LOSSES, LOSSES_WITHIN_S = 3, 600.0
"""More losses than this at one command, within so many seconds, are no coincidence: the command causes them."""


class ReplayRules(Protocol):
    """What the session knows of commands."""

    def note(self, command: Any) -> tuple[int, Sequence[str]]:
        """Returns how many optimizer steps a command has, and the files that workers read because of it."""

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
    """

    def __init__(self, rules: ReplayRules) -> None:
        self.rules = rules
        self.is_open, self.why_closed = False, ""
        self._commands: dict[int, Logged] = {}
        self._num_bytes = self._num_steps = 0
        self._files: dict[str, tuple[int, ...]] = {}
        self._when_forgotten: list[Callable[[], object]] = []
        self._losses: dict[int, deque[float]] = {}

    def open(self) -> None:
        """Keeps commands from now on; nothing happens where that was asked for before."""
        self.is_open = self.is_open or not self.why_closed

    def close(self, why: str) -> None:
        """Forgets all commands, and keeps none from now on."""
        if not self.is_open:
            return
        self.is_open, self.why_closed = False, why
        self._commands, self._files = {}, {}
        callbacks, self._when_forgotten = self._when_forgotten, []
        for callback in callbacks:
            callback()

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once the log is closed; at once if it is not open."""
        if self.is_open:
            self._when_forgotten.append(callback)
        else:
            callback()

    def add(self, command: SentCommand) -> None:
        """Keeps a command that is about to be sent; closes the log where it would be too long."""
        num_steps, files = self.rules.note(command.origin)
        packed = [command.payload] if isinstance(command.payload, Packed) else command.payload
        self._num_bytes += sum(map(_num_bytes, packed))
        self._num_steps += num_steps
        for file in files:
            self._files.setdefault(file, _identity(file))
        is_each = not isinstance(command.payload, Packed)
        self._commands[command.number] = Logged(
            command.number, command.epoch, command.recoverable, command.origin, is_each, num_steps
        )
        if self._num_steps > MOST_STEPS:
            self._close_full(f"more than {MOST_STEPS} steps would have to be computed again")
        elif self._num_bytes > MOST_BYTES:
            self._close_full(f"more than {MOST_BYTES >> 20} MiB of commands would have to be kept")

    def _close_full(self, why: str) -> None:
        self.close(why)
        self.rules.say(f"a worker that is lost from now on ends the run: {why}")

    def answered(self, command: SentCommand, values: Sequence[Any], error: BaseException | None) -> None:
        """Records how a command ended."""
        logged = self._commands.get(command.number)
        if logged is not None:
            logged.is_answered, logged.error = True, error
            if error is None:
                logged.figures = self.rules.figures(logged.origin, values)

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
