"""From the workers' answers to one outcome of a command.

Decides rules 1 and 3 below: which error a command ends in, whether a caller has to get it, and whether the
workers can go on together. Must not know processes, threads or replies.

[Note: errors]
Commands are sent ahead of their answers, so an error becomes known after later commands have left. Three rules make the
stream behave like one device all the same. (1) A worker that failed skips every command that was sent before the
controller raised the error; they share its epoch number. (2) The error is raised once: at the next call that sends a
command or reads a value; who reads a value that was skipped later gets a `NotComputedError`. (3) If only some workers
failed, their states may differ from then on, and a peer may wait for them in a collective for ever: unless the command
was declared recoverable, all workers are stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from moreh_ap.errors import MeshStartError, WorkerLostError
from moreh_ap.protocol.encoding import Failure, pack, restore_failure, unpack
from moreh_ap.runtime.relay.worker_answer import DONE, FAILED, SKIPPED, Answer
from moreh_ap.runtime.relay.worker_values import WorkerAnswers, WorkerValues

_NOTHING = pack(None)


class Outcome(NamedTuple):
    """How a command ended.

    Attributes:
        values: one result a worker, in rank order; empty after an error.
        error: what to raise instead, if anything.
        is_new: the error is this command's own, and not the one because of which workers skip commands.
        must_stop: the workers cannot go on together.
    """

    values: Sequence[object]
    error: BaseException | None = None
    is_new: bool = False
    must_stop: bool = False


class OutcomeResolver:
    """Resolves the answers to commands, in the order in which these were sent.

    Args:
        place_of: Returns where a worker is, as in `WorkerTraceback`.
    """

    def __init__(self, place_of: Callable[[int], str] = lambda rank: "") -> None:
        self._place_of = place_of
        self._cause: tuple[int, BaseException] | None = None  # an epoch, and the error because of which it is skipped

    def resolve(self, epoch: int, recoverable: bool, answers: Sequence[Answer]) -> Outcome:
        """Returns how a command ended, given what all workers answered."""
        if isinstance(answers, WorkerAnswers) and (values := answers.values()) is not None:
            return _read_once(values)
        statuses = {answer.status for answer in answers}
        if statuses != {DONE}:
            error, is_new = self._error(epoch, answers)
            return Outcome([], error, is_new, DONE in statuses and (SKIPPED in statuses or not recoverable))
        try:
            first = answers[0]
            if first.content == _NOTHING and answers.count(first) == len(answers):  # most answers, of many workers too
                return Outcome([None] * len(answers))
            return Outcome([unpack(answer.content) for answer in answers if answer.content is not None])
        except Exception as error:  # a worker's answer cannot be built in this process: its reader gets the error
            return Outcome([], error, is_new=True)

    def resolve_hang(self, epoch: int, failed: Answer) -> Outcome:
        """Returns how a command ended of which one worker is known to have failed and others do not answer."""
        error, is_new = self._error(epoch, [failed])
        return Outcome([], error, is_new, must_stop=True)

    def remember(self, epoch: int, error: BaseException) -> None:
        """Has what is skipped in `epoch` end in `error`, in which the command behind that ended before a replay."""
        self._cause = epoch, error

    def _error(self, epoch: int, answers: Sequence[Answer]) -> tuple[BaseException, bool]:
        if self._cause is not None and self._cause[0] == epoch:
            return self._cause[1], False
        failure = failure_of(next(answer for answer in answers if answer.status == FAILED))
        error = restore_failure(failure, self._place_of(failure.rank))
        self._cause = epoch, error
        return error, True


def _read_once(values: WorkerValues) -> Outcome:
    """Returns the outcome of a command that all workers of several hosts have done: others are read on demand."""
    try:
        values[0]
    except Exception as error:  # as above
        return Outcome([], error, is_new=True)
    return Outcome(values)


def failure_of(answer: Answer) -> Failure:
    """Returns what a worker says of its failure."""
    assert answer.content is not None, "a worker that failed says why"
    failure = unpack(answer.content)
    assert isinstance(failure, Failure)
    return failure


class PeersHang(Exception):
    """A worker failed and the others do not answer.

    Attributes:
        answer: what the worker answered that failed.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def stopped_error(cause: BaseException | None) -> WorkerLostError:
    """Returns the error of commands to workers that have been stopped, for the reason `cause`."""
    first_line = str(cause).partition("\n")[0]
    error = WorkerLostError(
        f"The workers are stopped: {type(cause).__name__}: {first_line}",
        "a new start of the script; or other workers, for a model that is built again and loads its last checkpoint",
        "torch.moreh.option.enable_advanced_parallelization()  # other workers start",
        "docs/recovery.md#go-on",
    )
    error.__cause__ = cause
    return error


def unexpected_error(error: Exception, num_workers: int, *, was_ready: bool) -> MeshStartError | WorkerLostError:
    """Returns an error of the receiving thread itself, without which the workers cannot go on, for callers.

    Args:
        error: What was raised.
        num_workers: How many workers there are.
        was_ready: Whether the workers had joined each other.
    """
    text = f"{type(error).__name__}: {error}"
    wrapped: MeshStartError | WorkerLostError
    if was_ready:
        wrapped = WorkerLostError(f"The connection to the workers failed: {text}")
    else:
        wrapped = MeshStartError(f"The {num_workers} worker processes could not be started: {text}")
    wrapped.__cause__ = error
    return wrapped
