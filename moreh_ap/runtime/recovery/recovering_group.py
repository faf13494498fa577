"""A worker group that outlives its workers.

Decides how others take over when one is lost. Must not know what a command means, nor torch, nor the engine.

[Note: replay]
A command is frozen and names everything by explicit numbers, and random states travel with it. So what workers hold is
the commands that they got: workers that get the same, in the same order, hold the same. When a worker is lost, all are
ended, since its peers may wait for it in a collective for ever; as many others start, join each other, and get again
every command that had been answered. Their answers are compared with those of before, which stay valid. Then the
commands without an answer are sent as they were: whoever waits for one of them waits longer and notices nothing else.
A command that ended in an error ends in it again, and is skipped by the same commands behind it (see [Note: errors] in
`outcome_resolver.py`).

[Note: another plan]
Workers that ran out of memory cannot repeat the same: others under another plan, perhaps another number of them,
make a group of their own, to which the log is handed on. They get what was answered before the command that
failed, with models built under their plans; what each of them answers is not what each of those before did, so it is
compared from then on only. That command and those behind it are sent to the new group like any others, by the session.

[Note: values on the way]
On several hosts a large value goes ahead of its command to the memory of each host, over the connections that end with
the workers and may not have arrived. So commands that others get as they were are packed once more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from moreh_ap.errors import ExactnessError, MeshStartError, WorkerLostError
from moreh_ap.local import logger
from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import EngineError, was_too_slow
from moreh_ap.runtime.future import SentCommand
from moreh_ap.runtime.joining import launch
from moreh_ap.runtime.launcher import POLL_S, Launcher, LaunchRequest, Stopping
from moreh_ap.runtime.outcome_resolver import OutcomeResolver, PeersHang
from moreh_ap.runtime.receiver import Receiver
from moreh_ap.runtime.recovery.command_log import CommandLog, Logged
from moreh_ap.runtime.recovery.copy_memory import CopyMemory
from moreh_ap.runtime.recovery.loss_wording import as_sentence, before_first_copy, in_short, of_error, steps_were
from moreh_ap.runtime.recovery.losses import MOST_LOSSES
from moreh_ap.runtime.recovery.other_devices import DevicesJoinedError, NoOthersError
from moreh_ap.runtime.recovery.past import Past
from moreh_ap.runtime.recovery.rules import ReplayRules
from moreh_ap.runtime.relay.carrier import Awaited, Carrier
from moreh_ap.runtime.worker_group import MakeLauncher, WorkerGroup

_AHEAD = 16  # commands that are sent again before the answer to the first of them is waited for
_SEE = "docs/errors.md#workerlosterror"
_STARTS = 2  # in a row that fail: a device may be gone
_DEAD_WITHIN_S = 5.0  # a connection to a process breaks before it is seen to be gone: later on a busy machine


class RecoveringWorkerGroup(WorkerGroup):
    """Worker processes in whose place others take over. See [Note: replay].

    Args:
        num_workers: How many processes, one a device.
        make_rules: Returns what the session knows of commands, once they are kept.
        is_frugal: As for `CommandLog`.
        past: Which commands these workers get first; None: none.
        make_launcher: As for `WorkerGroup`.
        others: As for `WorkerGroup`.
    """

    _why_waiting = ""  # why devices that have joined have no workers yet

    def __init__(
        self,
        num_workers: int,
        *,
        make_rules: Callable[[], ReplayRules],
        is_frugal: bool = False,
        past: Past | None = None,
        make_launcher: MakeLauncher | None = None,
        **others: Any,
    ) -> None:
        self._past, self._has_lost = past, False  # first: a thread starts in the other constructor
        self._copies = CopyMemory(num_workers) if past is None else past.copies
        self._log = CommandLog(make_rules, is_frugal=is_frugal) if past is None else past.log
        self._log.copies = lambda: self._launcher.copies
        make = make_launcher or Launcher

        def make_keeping(request: LaunchRequest, is_stopping: Callable[[], bool]) -> Launcher:
            return make(replace(request, copies=self._copies), is_stopping)

        super().__init__(num_workers, make_launcher=make_keeping, **others)
        if past is not None:
            self._last_number, self._epoch = past.number, past.epoch

    def keep_commands(self) -> None:
        """Keeps the commands from now on: the workers have nothing yet that is not in them."""
        with self._lock:
            self._log.open()
            self.keeps_commands, self.keeps_values = self._log.is_open, self._log.keeps_values

    def forget_commands(self, why: str) -> None:
        """Keeps no commands from now on: a worker that is lost ends the run, which is said if it did not before."""
        with self._lock:
            if self._log.is_complete:
                self._log.rules.say(f"a worker that is lost from now on ends the run: {why}")
            self._log.close(why)
            self.keeps_commands, self.keeps_values, self.wanted = False, False, None

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once no command of before can be sent again."""
        self._log.when_forgotten(callback)

    def close(self) -> None:
        """Ends all workers at once, and forgets their commands."""
        super().close()
        self._log.close("the workers have been closed")
        self._copies.close()

    def _send(self, command: SentCommand) -> None:
        if command.origin is not None:
            log = self._log
            if log.is_open:
                log.add(command)
            self.keeps_commands, self.wanted = log.is_open, log.wanted
            self.keeps_values = log.is_complete or log.keeps_values
        if self._has_lost and self._carrier is not None:
            command = self._packed_for_these(command)
        super()._send(command)

    def _complete(self, command: SentCommand, values: Sequence[object], error: BaseException | None) -> None:
        log = self._log
        num_copies = log.num_copies
        if command.origin is not None:
            log.answered(command, values, error)
        super()._complete(command, values, error)
        if log.num_copies > num_copies:
            self._look_for_joined()

    # -- other plans, see [Note: another plan] ---------------------------------------------------------------------

    def _look_for_joined(self) -> None:
        """Has the workers end, now that there is a copy of what they hold, if there are more devices for others.

        Raises:
            DevicesJoinedError: There are; another number of workers on them is for the session to start.
        """
        joined = self._launcher.copied()
        if joined is None:
            return
        why = self.why_bound(None) if joined.num_workers != self.num_workers else ""
        if not why:
            raise DevicesJoinedError(joined)
        if why != self._why_waiting:
            self._why_waiting = why
            self._log.rules.say(f"{joined.fact} Not yet: {why}")

    def why_bound(self, error: BaseException | None) -> str:
        """Returns why workers under other plans cannot go on from before the command that ended in `error`, if any."""
        log = self._log
        if not log.is_open:
            return log.why_closed
        if not log.is_complete:
            return "no copy of what workers hold has been taken yet"
        if any(one.error is not None or one.is_each for one in _before(log, error)):
            return "a command of before ended in an error as well"
        return log.bound

    def copy_after_error(self) -> Sequence[Any] | None:
        """Has workers copy what they hold, all of which have ended in an error; others can take over from then on.

        Returns:
            Their answers; None: there is no memory that outlives a worker.

        Raises:
            Exception: A worker raised it.
        """
        command = self._log.snapshot_after_error()
        return None if command is None else self.submit(command).result()

    def end_for_others(self, error: BaseException, change: Callable[[Any], Any], num_workers: int, reason: str) -> Past:
        """Ends the workers, and returns the log for so many workers under other plans.

        Args:
            error: In which a command has ended that is going to be sent to the others, with all behind it.
            change: Returns a command for them, itself if it does not depend on plans.
            num_workers: How many they are.
            reason: Why, for the log.
        """
        self._launcher.leave_agents()
        super().close()
        log = self._log
        before = _before(log, error)
        changed = log.rules.for_others(change, self.num_workers)
        log.keep_only([replace(one, origin=changed(one.origin), figures=None) for one in before])
        self._copies.for_others(num_workers, log.rules.complete_slot())
        number = before[-1].number if before else 0
        is_loss = isinstance(error, WorkerLostError) and not isinstance(error, DevicesJoinedError)
        return Past(log, self._copies, number, self._epoch, reason, is_loss)

    def _start(self) -> Receiver:
        if self._past is None:
            return self._start_first()
        started_s = time.monotonic()
        try:
            receiver, num_steps = self._tell_others()
        except (WorkerLostError, MeshStartError) as another:
            receiver, num_steps = self._replace(WorkerLostError(another.fact, another.allowed, another.fix)), 0
        else:
            if self._past.is_loss:
                self._log.rules.others_took_over()
            took_s = time.monotonic() - started_s
            self._log.rules.say(f"{self._past.reason}: {steps_were(num_steps)} computed again, {took_s:.1f} s")
        self._on_progress("ready", self.num_workers, self.num_workers)
        self._ready.set()
        return receiver

    def _start_first(self) -> Receiver:
        """Starts the workers; others where some are lost while they join each other."""
        for _ in range(MOST_LOSSES):
            try:
                return super()._start()
            except MeshStartError as error:
                if not _was_lost(error) or was_too_slow(error) or self.is_stopped():
                    raise
                logger.say(f"{error.fact} Others start in their place", logger.NOTICE)
                self._prepare_others()
        return super()._start()

    # -- after a loss ----------------------------------------------------------------------------------------------

    def _packed_for_these(self, command: SentCommand) -> SentCommand:
        """Returns a command as the workers that there are now can read it. See [Note: values on the way].

        Raises:
            WorkerLostError: It is not kept.
        """
        payload, origin, memory = command.payload, command.origin, self.shared_memory
        each = [payload] if isinstance(payload, Packed) else payload
        if not any(memory.is_gone(one.buffers) for one in each):
            return command
        if origin is None:
            raise WorkerLostError("A large value that workers were sent before the first model is lost with them.")
        for one in each:
            memory.release(one.buffers)
        if isinstance(payload, Packed):
            return command._replace(payload=self._packed(origin))
        return command._replace(payload=[self._packed(one, rank) for rank, one in enumerate(origin)])

    def _prepare_to_stop(self, error: BaseException | None) -> None:
        deadline_s = time.monotonic() + (_DEAD_WITHIN_S if self._log.is_complete else 0.0)
        while (lost := self._launcher.find_dead()) is None and time.monotonic() <= deadline_s:
            time.sleep(POLL_S)
        if lost is not None:
            raise lost
        if self._log.is_complete and self._log.rules.may_be_others(error):
            self._launcher.leave_agents()

    def _replace(self, lost: WorkerLostError) -> Receiver:
        started_s, first, is_loss = time.monotonic(), lost, not isinstance(lost, DevicesJoinedError)
        if isinstance(lost, DevicesJoinedError) and lost.num_workers != self.num_workers:
            self._launcher.leave_agents(of_joined=True)
            raise lost
        with self._lock:
            self._carrier, self._has_lost = None, True  # commands wait, until the others know what was answered
            self._unsent.extendleft(command for command, _ in reversed(self._sent))
            self._sent.clear()
            number = self._unsent[0].number if self._unsent and is_loss else None
        if not self._log.is_complete and not self._log.why_closed:
            raise before_first_copy(lost) if self._log.is_open and is_loss else lost
        num_starts = 0
        while True:
            reason = self._log.why_not(number)
            try:
                reason = reason or self._prepare_others()
                if not reason:
                    receiver, num_steps = self._tell_others()
                    break
            except NoOthersError as fewer:
                raise fewer.after(first, in_short(first)) from first.__cause__
            except WorkerLostError:
                num_starts = 0
            except MeshStartError as another:
                num_starts = 0 if _was_lost(another) else num_starts + 1
                if num_starts == _STARTS:
                    fact = f"{in_short(first)} No others can be started: {another.fact}"
                    raise NoOthersError(fact, another.allowed, another.fix, _SEE) from first.__cause__
            if reason:
                fact = f"{as_sentence(first.fact)} The run cannot go on: {reason}."
                raise WorkerLostError(fact, first.allowed, first.fix) from first.__cause__
            number = self._last_number if number is None else number  # what is sent again may be the cause
        self._log.memory_differs()
        if is_loss:
            self._log.rules.others_took_over()
        took_s = time.monotonic() - started_s
        again = f"{steps_were(num_steps)} computed again"
        self._log.rules.say(f"{in_short(first)} Others took over: {again}, {took_s:.1f} s")
        return receiver

    def _tell_others(self) -> tuple[Receiver, int]:
        """Starts other workers and tells them all; returns what receives their answers, and the steps in that."""
        receiver = launch(self._launcher, lambda stage, done, total: None, self._come_first_at_exit, self.is_stopped)
        carrier = receiver.carrier = self._launcher.carrier(self.shared_memory)
        self._resolver = OutcomeResolver(self._launcher.place_of)
        answered = self._log.answered_commands()
        on_the_way: deque[tuple[Logged, list[Packed], Awaited]] = deque()
        try:
            for logged in answered:
                on_the_way.append((logged, *self._tell_again(logged, carrier)))
                if len(on_the_way) > _AHEAD:
                    self._compare(*on_the_way.popleft(), receiver)
            while on_the_way:
                self._compare(*on_the_way.popleft(), receiver)
            self._launcher.restored()
        finally:
            for _, payload, _ in on_the_way:  # these workers have been lost, too
                self._release(payload)
        with self._lock:
            unsent = [self._packed_for_these(command) for command in self._unsent]  # noted when they were submitted
            self._carrier = carrier
            self._unsent.clear()
            for command in unsent:
                super()._send(command)
        return receiver, sum(logged.num_steps for logged in answered)

    def _prepare_others(self) -> str:
        """Ends the workers, so that others may be launched; returns why they may not, empty if they may."""
        reason = self._launcher.prepare_again()
        if not reason or (self._log.has_copy and self._launcher.copies is not self._copies):
            return reason
        before, self._launcher = self._launcher, self._make_launcher(self._request, self.is_stopped)
        before.end()
        return ""

    def _release(self, payload: Sequence[Packed]) -> None:
        for packed in payload:
            if packed.buffers:
                self.shared_memory.release(packed.buffers)

    def _tell_again(self, logged: Logged, carrier: Carrier) -> tuple[list[Packed], Awaited]:
        again = self._log.rules.again
        if logged.is_each:
            each = [self._packed(again(one), rank) for rank, one in enumerate(logged.origin)]
            return each, carrier.execute(logged.number, logged.epoch, each)
        packed = self._packed(again(logged.origin))
        return [packed], carrier.execute(logged.number, logged.epoch, packed)

    def _compare(self, logged: Logged, payload: list[Packed], pending: Awaited, receiver: Receiver) -> None:
        """Waits for the answers to a command that was sent again, and compares them with those of before.

        Raises:
            ExactnessError: They differ by more than rounding.
            WorkerLostError: One of the other workers was lost, too.
        """
        try:
            answers = receiver.receive(logged.number, logged.epoch, pending)
            outcome = self._resolver.resolve(logged.epoch, logged.recoverable, answers)
        except PeersHang as hang:
            outcome = self._resolver.resolve_hang(logged.epoch, hang.answer)
        finally:
            self._release(payload)
        if outcome.must_stop:
            self._prepare_to_stop(outcome.error)
        if logged.error is None and outcome.error is not None and logged.figures is None:
            self._stop(outcome.error)  # under another plan: the script, or the session, gets the error
            raise Stopping
        if logged.error is None and outcome.error is None:
            now = self._log.rules.figures(logged.origin, outcome.values)
            if logged.figures is None:
                logged.figures = now
            found = self._log.rules.difference(logged.figures, now)
        elif logged.error is not None and outcome.error is not None:
            self._resolver.remember(logged.epoch, logged.error)
            found = ""
        else:
            found = f"{of_error(logged.error)} before, {of_error(outcome.error)} now"
        if found:
            raise ExactnessError(
                f"The workers that took over after a loss do not compute what those before them did: {found}",
                "models whose numbers depend on what the script gives them alone",
                "export MOREH_RECOVERY=off",
                "docs/recovery.md#differences",
            ) from outcome.error


def _before(log: CommandLog, error: BaseException | None) -> list[Logged]:
    """Returns the kept commands before the first that ended in `error`: all that were answered, if none did."""
    answered = log.answered_commands()
    ended = (index for index, one in enumerate(answered) if error is not None and one.error is error)
    return answered[: next(ended, len(answered))]


def _was_lost(error: MeshStartError) -> bool:
    """Returns whether a worker started and was lost, in place of not starting at all."""
    return isinstance(error.__cause__, (EngineError, WorkerLostError))
