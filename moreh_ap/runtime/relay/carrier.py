"""What carries commands to workers and their answers back, as those see it who send commands and wait for answers.

Must not know what carries them, nor commands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.worker.actor import Trouble

Ask = Callable[[int, object], object]
"""Has the worker of a rank execute one more command, whatever the others wait for; returns its answer, None without."""


class Carrier(Protocol):
    """Sends commands to workers: over connections to them, or to the agents of their hosts."""

    def execute(self, number: int, epoch: int, command: Packed | Sequence[Packed]) -> AwaitedOfEach:
        """Sends one command to all workers, or each its own."""

    def answered(self, number: int) -> Sequence[bool]:
        """Returns by rank whether a worker has answered a command; nothing where all have, or hosts alone know."""

    def troubles(self) -> Sequence[Trouble]:
        """Returns the failures that workers have reported, which they do at once."""


class Awaited(Protocol):
    """Answers that are on their way."""

    def wait(self, timeout_s: float) -> Sequence[Answer]:
        """Returns the answers in rank order. May be called again after a time-out.

        Raises:
            TimeoutError: Not all answers are in.
            EngineError: An answer will never come.
        """


class AwaitedOfEach(Awaited, Protocol):
    """Answers that are on their way, and those of single workers that have come."""

    @property
    def answers(self) -> Sequence[Answer | None]:
        """Those of this machine's workers in rank order, None where one is not there yet; none of several hosts."""
