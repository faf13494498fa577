"""How other workers go on: what is sent to them first, and which messages may have to be.

Decides which messages ended because of one error, and when a message is of no use any more. Must not know what commands
mean, nor when they leave.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from moreh_ap.errors import WorkerLostError
from moreh_ap.runtime.future import Reply
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.journal import Journal

Message = tuple[list[Any], list[Any], Reply]
"""Commands, the promises of their results, and the reply."""


class Restart(NamedTuple):
    """How other workers go on.

    Attributes:
        workers: The others.
        change: The change to each command of the journal, which is replayed.
        error: If they know all that was done before a command ended in it: the error. Then this command and those
            behind it are sent again, and no journal is replayed.
        again: What they are sent otherwise, commands and promises of each message.
    """

    workers: WorkerGroup
    change: Callable[[Any], Any]
    error: Exception | None = None
    again: Sequence[tuple[list[Any], list[Any]]] = ()

    def messages(self, journal: Journal, unanswered: Unanswered) -> Sequence[tuple[list[Any], list[Any]]]:
        """Returns what the others are sent first: commands and promises of each message."""
        if self.again:
            return self.again
        if self.error is None:
            return journal.changed(self.change)
        return [(commands, posted) for commands, posted, _ in unanswered.ended_in(self.error)]


class Unanswered(dict[int, Message]):
    """Messages that have no answer, or an error for one, by the `id` of their reply, in the order of their sending.

    A step makes no call for them.

    Attributes:
        has_failed: Whether one of them has ended in an error.
    """

    has_failed = False

    def forget_before(self, reply: Future[Any]) -> None:
        """Forgets messages that ended in errors and were sent before one that was answered: the errors were raised."""
        messages = list(self.values())
        place = next((index for index, (_, _, own) in enumerate(messages) if own is reply), 0)
        for _, _, own in messages[:place]:
            if _has_failed(own):
                self.pop(id(own), None)
                own.group.let_go(own)
        self.has_failed = any(_has_failed(own) for _, _, own in messages[place:])

    def ended_in(self, error: BaseException) -> list[Message]:
        """Returns the messages that ended in an error, or had no answer when their workers were ended after it."""
        found = []
        for message in self.values():
            reply = message[2]
            ended_in = reply.exception() if reply.done() else error
            if ended_in is error or isinstance(ended_in, WorkerLostError):
                found.append(message)
        return found


def _has_failed(reply: Future[Any]) -> bool:
    return reply.done() and reply.exception() is not None
