"""The ordered stream of commands to the workers: which commands share a message, and when it is sent.

[Note: when commands leave]
A message costs the same whether it holds one command or ten, so commands gather in the outbox. `submit` sends it: for
commands that workers should start at once (a forward) and commands that a caller waits for. `post_soon` gathers only
while workers are busy, so that they are never idle because of it; the reply that makes them idle sends the outbox. GPUs
would be idle while that reply travels, so for them `post_soon` sends at once.
`post` is for commands that may wait for the next message: cleared gradients, operations on state tensors.

[Note: after an error]
Workers skip what was sent behind a command that raised. Of that, what says how things are set (attributes, frozen
parameters, optimizers and their loaded state) is sent again before anything else, since the script has set it; what was
computed is not, and whoever reads it gets a `NotComputedError`. `times_failed` tells others that what they sent along
with other commands, or believe of the workers, may be wrong.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from itertools import count
from typing import Any

from moreh_ap.protocol.encoding import WorkerTraceback
from moreh_ap.protocol.messages.calls import Forward
from moreh_ap.protocol.messages.models import ChangeModule, SetKernelFormats, SetRequiresGrad
from moreh_ap.protocol.messages.optimizers import BuildOptimizer, LoadOptimizer, StepOptimizer
from moreh_ap.protocol.messages.state import ClearGradients
from moreh_ap.protocol.messages.stream import Again, Batch, DefineList
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.future import Reply, told_again
from moreh_ap.runtime.relay.worker_values import WorkerValues
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.journal import Journal
from moreh_ap.session.replay.restart import Restart, Unanswered
from moreh_ap.states import SessionState, StateMachine

_MAX_GATHERED = 512
_MAX_DEFINITIONS = 4096
_IDS = count()
_SENT_AGAIN = (BuildOptimizer, LoadOptimizer, ChangeModule, SetRequiresGrad, SetKernelFormats)
"""What says how things are set. See [Note: after an error]."""


def has_failed(reply: Future[Any] | None) -> bool:
    """Whether a command is done and ended in an error. Never waits."""
    return reply is not None and reply.done() and reply.exception() is not None


class Posted:
    """The promise of one command's result; the command may be in the outbox, in flight, or done."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._reply: Reply | None = None
        self._index = 0
        self._lost: BaseException | None = None  # the error because of which it was not sent
        self._callbacks: list[Callable[[Posted], object]] = []

    def sent(self, reply: Reply, index: int) -> None:
        """Records that the command was sent, perhaps again, as number `index` of a message."""
        self._reply, self._index = reply, index
        for callback in self._callbacks:
            reply.add_done_callback(lambda _, callback=callback: callback(self))  # type: ignore[misc]

    def lost(self, error: BaseException) -> None:
        """Records that the command was never sent, since `error` was raised instead."""
        self._lost = error
        for callback in self._callbacks:
            callback(self)

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._lost is not None or (self._reply is not None and self._reply.done())

    def failed(self) -> bool:
        """Whether the command is done and ended in an error. Never waits."""
        return self._lost is not None or has_failed(self._reply)

    def require(self) -> None:
        """Raises what `result` would raise, if the command has failed. Never waits."""
        if self.failed():
            self.result()

    def result(self) -> Sequence[Any]:
        """Returns the command's results, one for each worker in rank order; waits for them.

        Raises:
            Exception: A worker raised it; its type is kept.
            NotComputedError: It was raised before.
            WorkerLostError: A worker process died.
        """
        while True:
            if self._lost is not None:
                raise told_again(self._lost)
            if not self.done():  # the gathered commands run while this thread waits
                self._outbox.flush()
            assert self._reply is not None
            times_restarted = self._outbox.times_restarted
            try:
                found = self._reply.group.answers(self._reply)
                if isinstance(found, WorkerValues):
                    return found.item(self._index)
                return [answers[self._index] for answers in found]
            except Exception as error:  # of any class: workers raise the errors of the model's code
                if not self._outbox.recovered(error, times_restarted):
                    raise

    def add_done_callback(self, callback: Callable[[Posted], object]) -> None:
        """Calls ``callback(self)`` once the command is done, in the thread that receives answers (or at once).

        A command that failed may be sent again: then it is called once more.
        """
        self._callbacks.append(callback)
        if self._reply is not None:
            self._reply.add_done_callback(lambda _: callback(self))


class Outbox:
    """Gathers commands and sends them in order. See [Note: when commands leave].

    Args:
        workers: The worker group that runs the commands.
        leaves_at_once: Whether what is wanted soon leaves although workers are busy.

    Attributes:
        state: Whether the journal has all commands since the first model.
        journal: What was sent since a model was built, until it has been trained for a step.
        unanswered: The messages without an answer, and those that ended in an error.
        on_sent: Called with the commands of each message, and the promises of their results; None: no call is made.
        on_error: Called with an error before the script gets it: returns how to replay the journal, or None if the
            script has to get the error; it may raise a better one.
        times_restarted: The number of replays.
        num_posted: How many commands were given to it.
        has_stale_definitions: Whether workers may have missed a definition; then the next use sends all again.
        times_forgotten: How often that happened; workers have a definition while this number stays.
        times_failed: How many messages failed, or were not carried out for an error. See [Note: after an error].
    """

    def __init__(self, workers: WorkerGroup, *, leaves_at_once: bool = False) -> None:
        self._workers, self._leaves_at_once = workers, leaves_at_once
        self.state = StateMachine(SessionState.EMPTY)
        self.journal = Journal(self.state)
        self.on_sent: Callable[[Sequence[Any], Sequence[Posted]], object] | None = None
        self.on_error: Callable[[Exception], Restart | None] | None = None
        self.times_restarted = self.num_posted = 0
        self._lock, self._ids = threading.RLock(), _IDS
        self._gathered: list[tuple[Any, Posted]] = []
        # Filled by finalizers, which may run in any thread at any time: deque.append is atomic.
        self._released: deque[Any] = deque()
        self._messages_sent, self._messages_answered, self._hurry = 0, 0, False
        self.unanswered = Unanswered()
        self._definitions: dict[Hashable, int] = {}
        self.has_stale_definitions = False
        self.times_forgotten = self.times_failed = 0
        self._again: deque[Any] = deque()  # commands to be sent again
        self._failure: BaseException | None = None  # the last error

    def new_id(self) -> int:
        """Returns a number that was not used before, also not for workers that this process has lost."""
        return next(self._ids)

    def post(self, command: Any) -> Posted:
        """Gathers a command: it runs in order, before the next one that is submitted."""
        with self._lock:
            posted = Posted(self)
            self.num_posted += 1
            self._gathered.append((command, posted))
            if len(self._gathered) >= _MAX_GATHERED:
                self.flush()
            return posted

    def post_soon(self, command: Any) -> Posted:
        """Sends a command at once if the workers are idle, otherwise when they become idle, or earlier."""
        with self._lock:
            posted = self.post(command)
            self._hurry = True
        # A reply may arrive in between, and its thread did not get the lock: check again without it.
        if self._leaves_at_once or self._idle():
            self.flush()
        return posted

    def submit(self, command: Any) -> Posted:
        """Sends all gathered commands and then `command`."""
        with self._lock:
            posted = self.post(command)
            self.flush()
            return posted

    def flush(self) -> None:
        """Sends the gathered commands, if any."""
        with self._lock:
            leaving, self._gathered = self._gathered, []
            self._hurry = False
            commands: list[Any] = []
            posted: list[Posted] = []
            while self._again:
                commands.append(self._again.popleft())
                posted.append(Posted(self))
            for command, promise in leaving:
                if isinstance(command, list):  # of gradients, see `post_clear`
                    command = ClearGradients(self.list_id(tuple(command)))
                    commands += [definition for definition, _ in self._gathered]
                    posted += [defined for _, defined in self._gathered]
                    self._gathered = []
                commands.append(command)
                posted.append(promise)
            releases: list[Any] = []
            while self._released:
                releases.append(self._released.popleft())
            commands += releases
            if not commands:
                return
            if self.state.current is SessionState.REPLAYABLE or self._workers.keeps_values:  # after they were sent
                for index, command in enumerate(commands):
                    if type(command) is Forward:
                        commands[index] = command.owned()
            if self.state.current is SessionState.REPLAYABLE:
                self.journal.note(tuple(commands), tuple(posted))
            if self.on_sent is not None:
                self.on_sent(commands, posted)
            if self._workers.wanted is not None and self.state.current is not SessionState.REPLAYABLE:
                commands, posted = self._joined(self._workers.wanted, commands, posted)
            times_restarted = self.times_restarted
            try:
                reply = self._send(commands, posted)
            except Exception as error:  # a lost worker, or an earlier command's error, of any class
                self._released.extend(releases)
                sent = self._send_after(error, times_restarted, commands, posted)
                if sent is None:
                    return  # this message is in the journal, so it was replayed with the others
                reply, times_restarted = sent
        self._listen(reply, times_restarted, commands, releases)

    def _send_after(
        self, error: Exception, times_restarted: int, commands: list[Any], posted: list[Posted]
    ) -> tuple[Reply, int] | None:
        """Sends a message that an error kept back; returns reply and restarts before, None if a replay has sent it."""
        while True:
            try:
                if not self.recovered(error, times_restarted):
                    raise error
            except Exception as for_script:
                self._note_failure(commands)
                for promise in posted:
                    promise.lost(for_script)
                raise
            if any(promise._reply is not None for promise in posted):
                return None
            times_restarted = self.times_restarted
            try:
                return self._send(commands, posted), times_restarted
            except Exception as another:  # as in `recovered`
                error = another

    def _joined(self, command: Any, commands: list[Any], posted: list[Posted]) -> tuple[list[Any], list[Posted]]:
        """Returns a message with one command more, before its first forward: of those behind its last step, if any."""
        steps = [index for index, one in enumerate(commands) if type(one) is StepOptimizer]
        first = steps[-1] if steps else 0
        place = next((index for index in range(first, len(commands)) if type(commands[index]) is Forward), None)
        if place is None:
            return commands, posted
        joined = [*commands[:place], command, *commands[place:]]
        return joined, [*posted[:place], Posted(self), *posted[place:]]

    def recovered(self, error: Exception, times_restarted: int) -> bool:
        """Replays the journal on other workers, if `on_error` provides them; returns whether it did.

        Args:
            error: The error of a command.
            times_restarted: The attribute of this name at that time; another thread may have recovered since.

        Raises:
            Exception: The error that the script gets instead.
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
                except Exception as another:  # of any class, as above: the new workers ran the same code
                    error = another
            return False

    def restart(self, restart: Restart) -> None:
        """Sends all commands to other workers from now on, beginning with those that give them their state.

        Raises:
            Exception: One of these workers raised it meanwhile.
        """
        with self._lock:
            self._workers = restart.workers
            self.times_restarted += 1
            self._messages_sent = self._messages_answered = 0
            self.has_stale_definitions = True  # the new workers have only the definitions in the journal
            self._again.clear()  # what is sent now has all that was to be sent again
            messages = restart.messages(self.journal, self.unanswered)
            self.unanswered.clear()
            for commands, posted in messages:
                self._listen(self._send(commands, posted), self.times_restarted, commands)

    def _send(self, commands: list[Any], posted: list[Posted]) -> Reply:
        reply = self._workers.submit(Batch(tuple(commands)))
        self._messages_sent += 1
        self.unanswered[id(reply)] = commands, posted, reply
        for index, promise in enumerate(posted):
            promise.sent(reply, index)
        return reply

    def _listen(
        self, reply: Reply, times_restarted: int, commands: Sequence[Any], releases: Sequence[Any] = ()
    ) -> None:
        """Counts the reply when it arrives, unless its workers were replaced meanwhile.

        What a message was to free is freed with the next one if it fails: workers skip commands after an error.
        """

        def answered(done: Future[Any]) -> None:
            if times_restarted != self.times_restarted:
                return
            if has_failed(done):
                self._released.extend(releases)
                self.unanswered.has_failed = True
                self._note_failure(commands[self._num_done(done.exception(), commands) :])
            else:
                if self.unanswered.has_failed:
                    self.unanswered.forget_before(done)
                self.unanswered.pop(id(done), None)
            self._answered(done)

        reply.add_done_callback(answered)

    def _num_done(self, error: BaseException | None, commands: Sequence[Any]) -> int:
        """Returns how many of the commands of a message that ended in `error` were executed, or raised it."""
        if error is self._failure:
            return 0  # an earlier message raised it, and this one was skipped
        self._failure = error
        cause = None if error is None else error.__cause__
        return cause.num_done + 1 if isinstance(cause, WorkerTraceback) else len(commands)

    def _note_failure(self, skipped: Sequence[Any]) -> None:
        """Records commands that workers have not executed. See [Note: after an error]."""
        lost = [command for command in skipped if isinstance(command, (Again, *_SENT_AGAIN))]
        self._again.extend(command if isinstance(command, Again) else Again(command) for command in lost)
        self.has_stale_definitions = True
        self.times_failed += 1

    def release(self, command: Any) -> None:
        """Sends a command that frees something, with the next message, and again if a worker may have skipped it.

        Args:
            command: Harmless when it is executed twice.
        """
        self._released.append(command)

    def post_clear(self, gradients: Sequence[StateRef]) -> None:
        """Gathers gradients to clear while the script loops over its parameters: a list, which becomes a command."""
        if not gradients:
            return
        with self._lock:
            last = self._gathered[-1][0] if self._gathered else None
            if not isinstance(last, list):
                self.post(last := [])
            last.extend(gradients)

    def define(self, key: Hashable, make: Callable[[int], Any]) -> int:
        """Returns the number of `key` in commands; ``make(number)``, the definition for the workers, is posted once."""
        with self._lock:
            if self.has_stale_definitions or len(self._definitions) >= _MAX_DEFINITIONS:
                # After a failure workers skip the commands in flight, which may include definitions.
                self._definitions.clear()
                self.times_forgotten += 1
                self.has_stale_definitions = False
            if key not in self._definitions:
                number = self._definitions[key] = self.new_id()
                self.post(make(number))
            return self._definitions[key]

    def list_id(self, refs: tuple[StateRef, ...]) -> int:
        """Returns the number of a list of state tensors."""
        return self.define(refs, lambda number: DefineList(number, refs))

    def _idle(self) -> bool:
        return self._messages_answered == self._messages_sent

    def _answered(self, reply: Future[Any]) -> None:
        """Runs in the thread that receives replies, one at a time; it must not wait for the script's threads."""
        self._messages_answered += 1
        if not has_failed(reply) and self._idle() and self._hurry and self._lock.acquire(blocking=False):
            with contextlib.ExitStack() as freed, contextlib.suppress(Exception):  # for the script's next read
                freed.callback(self._lock.release)
                self.flush()
