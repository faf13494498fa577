"""The promise of a command's result. How a caller waits, and which errors it is told of, the worker group decides."""

from __future__ import annotations

import concurrent.futures
from typing import Any, Protocol


class Answering(Protocol):
    """The workers that a reply comes from."""

    def answers(self, reply: Any, timeout_s: float | None = None) -> list[Any]: ...


class Reply(concurrent.futures.Future):  # type: ignore[type-arg]
    """What the workers will answer to one command, one entry a worker, in rank order.

    Callbacks of `add_done_callback` run at once if the command is done, else in the thread that receives answers, which
    must not be kept waiting.

    Attributes:
        group: The workers.
        number: The command's number.
    """

    group: Answering
    number: int

    def result(self, timeout: float | None = None) -> list[Any]:
        """Returns the results, see `WorkerGroup.answers`; waits for them where it must, `timeout` seconds at most."""
        return self.group.answers(self, timeout)
