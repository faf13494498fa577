"""The ordered stream of commands on its way to the workers: what travels together, and when.

[Note: when commands leave]
A message costs the same whether it holds one command or ten, so commands gather in the outbox. `submit` sends it: for
what workers should begin at once (a forward) and for what somebody waits for. `post_soon` gathers only while workers
are busy with something else, so that they never stand idle for it; the answer that makes them idle sends the outbox.
`post` is for what may wait for the next message: cleared gradients, operations on state tensors.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any, NamedTuple

from moreh_ap.protocol.messages.state import ClearGradients
from moreh_ap.protocol.messages.stream import Batch, DefineList
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker_group import Reply, WorkerGroup
from moreh_ap.session.journal import Journal
from moreh_ap.states import SessionState, StateMachine

_MAX_GATHERED = 512
_MAX_DEFINITIONS = 4096


def has_failed(reply: Future[Any] | None) -> bool:
    """Whether a command is done and ended in an error. Never waits."""
    return reply is not None and reply.done() and reply.exception() is not None


class Posted:
    """The promise of one command's result, wherever the command is: in the outbox, on its way, or done."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._reply: Reply | None = None
        self._index = 0
        self._callbacks: list[Callable[[Posted], object]] = []

    def sent(self, reply: Reply, index: int) -> None:
        """The command left, perhaps once more, as number `index` of a message."""
        self._reply, self._index = reply, index
        for callback in self._callbacks:
            reply.add_done_callback(lambda _, callback=callback: callback(self))  # type: ignore[misc]

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._reply is not None and self._reply.done()

    def failed(self) -> bool:
        """Whether the command is done and ended in an error. Never waits."""
        return has_failed(self._reply)

    def result(self) -> list[Any]:
        """The command's results, one a worker, in rank order; waits for them.

        Raises:
            Exception: What a worker raised, with its own type.
            WorkerLostError: A worker process died.
        """
        while True:
            if not self.done():  # what is gathered is worked on while this thread waits
                self._outbox.flush()
            assert self._reply is not None
            times_restarted = self._outbox.times_restarted
            try:
                return [answers[self._index] for answers in self._reply.group.answers(self._reply)]
            except Exception as error:
                if not self._outbox.recovered(error, times_restarted):
                    raise

    def add_done_callback(self, callback: Callable[[Posted], object]) -> None:
        """Calls ``callback(self)`` once the command is done, in the thread that receives answers (or at once).

        A command that failed may be sent again: then it is called once more.
        """
        self._callbacks.append(callback)
        if self._reply is not None:
            self._reply.add_done_callback(lambda _: callback(self))


class Restart(NamedTuple):
    """How commands are done once more: by which workers, and what each is changed into."""

    workers: WorkerGroup
    change: Callable[[Any], Any]


class Outbox:
    """Gathers commands and sends them in order. See [Note: when commands leave].

    Args:
        workers: The worker group that runs the commands.

    Attributes:
        state: Whether the journal has all that the workers were told since the first model.
        journal: What was sent since a model was built, until it has been trained for a step.
        on_error: Asked about an error before the script learns of it: returns how what is in the journal is done once
            more, or None if the script has to know; it may raise a better error.
        times_restarted: How often that happened.
        has_stale_definitions: Whether workers may have missed a definition: the next one makes all be told anew.
        times_forgotten: How often that happened; a definition is known to workers while this number stays.
    """

    def __init__(self, workers: WorkerGroup) -> None:
        self.state = StateMachine(SessionState.EMPTY)
        self.journal = Journal(self.state)
        self.on_error: Callable[[Exception], Restart | None] | None = None
        self.times_restarted = 0
        self._workers = workers
        self._lock = threading.RLock()
        self._gathered: list[tuple[Any, Posted]] = []
        # Filled by finalizers, which may run in any thread at any time: deque.append is atomic.
        self._released: deque[Any] = deque()
        self._messages_sent, self._messages_answered = 0, 0
        self._hurry = False
        self._definitions: dict[Hashable, int] = {}
        self.has_stale_definitions = False
        self.times_forgotten = 0
        self._ids = count()

    def new_id(self) -> int:
        """A number that was not given before."""
        return next(self._ids)

    def post(self, command: Any) -> Posted:
        """Gather a command: executed in order, before whatever is submitted next."""
        with self._lock:
            posted = Posted(self)
            self._gathered.append((command, posted))
            if len(self._gathered) >= _MAX_GATHERED:
                self.flush()
            return posted

    def post_soon(self, command: Any) -> Posted:
        """Send a command at once if the workers are idle, otherwise at the latest when they are."""
        with self._lock:
            posted = self.post(command)
            self._hurry = True
        # An answer may come in between, whose receiver did not get the lock: look again without it.
        if self._idle():
            self.flush()
        return posted

    def submit(self, command: Any) -> Posted:
        """Send everything gathered and then `command`."""
        with self._lock:
            posted = self.post(command)
            self.flush()
            return posted

    def flush(self) -> None:
        """Send what is gathered, if anything."""
        with self._lock:
            leaving, self._gathered = self._gathered, []
            self._hurry = False
            commands: list[Any] = []
            posted: list[Posted] = []
            for command, promise in leaving:
                if isinstance(command, _Clearing):
                    command = ClearGradients(self.list_id(tuple(command.gradients)))
                    commands += [definition for definition, _ in self._gathered]
                    posted += [defined for _, defined in self._gathered]
                    self._gathered = []
                commands.append(command)
                posted.append(promise)
            while self._released:
                commands.append(self._released.popleft())
            if not commands:
                return
            if self.state.current is SessionState.REPLAYABLE:
                self.journal.note(tuple(commands), tuple(posted))
            times_restarted = self.times_restarted
            try:
                reply = self._send(commands, posted)
            except Exception as error:
                if self.recovered(error, times_restarted):
                    return  # this message is in the journal: it has been sent with the others
                raise
        self._listen(reply, times_restarted)

    def recovered(self, error: Exception, times_restarted: int) -> bool:
        """Have what is in the journal done once more by workers that can, if `on_error` knows any.

        Args:
            error: What went wrong.
            times_restarted: The attribute of this name when it did; somebody else may have noticed in the meantime.

        Raises:
            Exception: The error that the script is to see instead.
        """
        with self._lock:
            if times_restarted != self.times_restarted:
                return True
            while self.on_error is not None:
                restart = self.on_error(error)
                if restart is None:
                    return False
                try:
                    self.restart(restart)
                    return True
                except Exception as another:
                    error = another
            return False

    def restart(self, restart: Restart) -> None:
        """Send everything to other workers from now on, and what is in the journal, changed, before that.

        Raises:
            Exception: What these workers raised meanwhile.
        """
        with self._lock:
            self._workers = restart.workers
            self.times_restarted += 1
            self._messages_sent = self._messages_answered = 0
            self.has_stale_definitions = True  # these workers know those of the journal alone
            for message in self.journal.messages():
                commands = [restart.change(command) for command in message.commands]
                self._listen(self._send(commands, list(message.posted)), self.times_restarted)

    def _send(self, commands: list[Any], posted: list[Posted]) -> Reply:
        reply = self._workers.submit(Batch(tuple(commands)))
        self._messages_sent += 1
        for index, promise in enumerate(posted):
            promise.sent(reply, index)
        return reply

    def _listen(self, reply: Reply, times_restarted: int) -> None:
        """Count the answer when it comes, unless it is of workers that have been given up meanwhile."""
        reply.add_done_callback(lambda done: self._answered(done) if times_restarted == self.times_restarted else None)

    def release(self, command: Any) -> None:
        """Tell the workers, with the next message, that something is no longer needed."""
        self._released.append(command)

    def post_clear(self, gradients: Sequence[StateRef]) -> None:
        """Gather "these gradients are None now"; neighbours are joined into one command."""
        if not gradients:
            return
        with self._lock:
            last = self._gathered[-1][0] if self._gathered else None
            if not isinstance(last, _Clearing):
                last = _Clearing()
                self.post(last)
            last.gradients += gradients

    def define(self, key: Hashable, make: Callable[[int], Any]) -> int:
        """A number that stands for `key` in commands; ``make(number)``, which tells the workers, is posted once."""
        with self._lock:
            if self.has_stale_definitions or len(self._definitions) >= _MAX_DEFINITIONS:
                # After a failure workers skip what was on its way already: they may not have heard of a definition.
                self._definitions.clear()
                self.times_forgotten += 1
                self.has_stale_definitions = False
            if key not in self._definitions:
                number = self._definitions[key] = self.new_id()
                self.post(make(number))
            return self._definitions[key]

    def list_id(self, refs: tuple[StateRef, ...]) -> int:
        """A number for a list of state tensors."""
        return self.define(refs, lambda number: DefineList(number, refs))

    def _idle(self) -> bool:
        return self._messages_answered == self._messages_sent

    def _answered(self, reply: Future[Any]) -> None:
        """Runs in the thread that receives answers, one at a time; it must not wait for the script's threads."""
        self._messages_answered += 1
        self.has_stale_definitions = self.has_stale_definitions or has_failed(reply)
        if not has_failed(reply) and self._idle() and self._hurry and self._lock.acquire(blocking=False):
            try:
                self.flush()
            finally:
                self._lock.release()


class _Clearing:
    """Gradients to clear, gathered while the script loops over its parameters."""

    def __init__(self) -> None:
        self.gradients: list[StateRef] = []
