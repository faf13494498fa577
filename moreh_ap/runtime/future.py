"""The promise of a command's result. How a caller waits, and which errors are raised, the worker group decides."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from moreh_ap.errors import MeshStartError, NotComputedError, WorkerLostError
from moreh_ap.protocol.encoding import Packed


def told_again(cause: BaseException) -> BaseException:
    """Returns the error of a value that is missing because of an error that was raised before."""
    if isinstance(cause, (MeshStartError, WorkerLostError)):
        return cause
    first_line = str(cause).partition("\n")[0]
    error = NotComputedError(
        f"This value was not computed: the workers had raised {type(cause).__name__}: {first_line}",
        allowed="Values that are computed after the error.",
        fix="loss = model(**batch).loss  # anew, with a batch that raises no error",
    )
    error.__cause__ = cause
    return error


class Answering(Protocol):
    """The workers that a reply comes from."""

    def answers(self, reply: Any, timeout_s: float | None = None) -> list[Any]: ...

    def let_go(self, reply: Any) -> None: ...


class Reply(concurrent.futures.Future):  # type: ignore[type-arg]
    """The future answers of the workers to one command, one entry a worker, in rank order.

    Callbacks of `add_done_callback` run at once if the command is done, else in the thread that receives answers, which
    must not be kept waiting.

    Attributes:
        group: The workers.
        number: The command's number.
        payload: What was sent, of a command that ended in an error, until `let_go`; else empty.
    """

    group: Answering
    number: int
    payload: Packed | Sequence[Packed] = ()

    def result(self, timeout: float | None = None) -> list[Any]:
        """Returns the results, see `WorkerGroup.answers`; waits for them where it must, `timeout` seconds at most."""
        return self.group.answers(self, timeout)


class SentCommand(NamedTuple):
    """A command and where its result goes.

    Attributes:
        reply: The promise of its result.
        number: Its place in the stream of commands.
        epoch: How many errors had been raised when it was submitted.
        recoverable: See `WorkerGroup.submit`.
        payload: One for all workers, or a list with one a worker.
        origin: The command as it was submitted, if the worker group keeps commands, else None.
    """

    reply: Reply
    number: int
    epoch: int
    recoverable: bool
    payload: Packed | list[Packed]
    origin: Any = None
