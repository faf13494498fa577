"""What carries commands to workers and their answers back, as those see it who send commands and wait for answers.

Must not know what carries them, nor commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.relay.worker_answer import Answer
from moreh_ap.runtime.worker.actor import Trouble


class Carrier(Protocol):
    """Sends commands to workers: over connections to them, or to the agents of their hosts."""

    def execute(self, number: int, epoch: int, command: Packed | Sequence[Packed]) -> Awaited:
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
