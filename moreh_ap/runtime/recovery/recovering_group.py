"""A worker group that outlives its workers.

Decides how others take over when one is lost. Must not know what a command means, nor torch, nor the engine.

[Note: replay]
A command is frozen and names everything by explicit numbers, and random states travel with it. So what workers hold is
what they were told: others that are told the same, in the same order, hold the same. When a worker is lost, all are
ended, since its peers may wait for it in a collective for ever; as many others start, join each other, and are told
again every command that had been answered. Their answers are compared with those of before, which stand. Then the
commands without an answer are sent as they were: whoever waits for one of them waits longer and notices nothing else.
A command that ended in an error ends in it again, and is skipped by the same commands behind it (see [Note: errors] in
`outcome_resolver.py`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from moreh_ap.errors import ExactnessError, MeshStartError, WorkerLostError
from moreh_ap.local import logger
from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import EngineError, was_too_slow
from moreh_ap.runtime.future import SentCommand
from moreh_ap.runtime.joining import launch
from moreh_ap.runtime.launcher import POLL_S
from moreh_ap.runtime.outcome_resolver import OutcomeResolver, PeersHang
from moreh_ap.runtime.receiver import Receiver
from moreh_ap.runtime.recovery.command_log import MOST_LOSSES, CommandLog, Logged, ReplayRules
from moreh_ap.runtime.relay.carrier import Awaited, Carrier
from moreh_ap.runtime.worker_group import WorkerGroup

_AHEAD = 16  # commands that are told again before the answer to the first of them is waited for
_DEAD_WITHIN_S = 5.0  # a connection to a process breaks before it is seen to be gone: later on a busy machine


class RecoveringWorkerGroup(WorkerGroup):
    """Worker processes in whose place others take over. See [Note: replay].

    Args:
        num_workers: How many processes, one a device.
        make_rules: Returns what the session knows of commands, once they are kept.
        is_frugal: As for `CommandLog`.
        others: As for `WorkerGroup`.
    """

    def __init__(
        self, num_workers: int, *, make_rules: Callable[[], ReplayRules], is_frugal: bool = False, **others: Any
    ) -> None:
        self._log = CommandLog(make_rules, is_frugal=is_frugal)  # first: a thread starts in the other constructor
        super().__init__(num_workers, **others)

    def keep_commands(self) -> None:
        """Keeps the commands from now on: the workers have nothing yet that is not in them."""
        with self._lock:
            self._log.open()
            self.keeps_commands, self.keeps_values = self._log.is_open, self._log.keeps_values

    def when_forgotten(self, callback: Callable[[], object]) -> None:
        """Calls `callback` once no command of before can be sent again."""
        self._log.when_forgotten(callback)

    def close(self) -> None:
        """Ends all workers at once, and forgets their commands."""
        super().close()
        self._log.close("the workers have been closed")

    def _send(self, command: SentCommand) -> None:
        if command.origin is not None:
            log = self._log
            if log.is_open:
                log.add(command)
            self.keeps_commands, self.wanted = log.is_open, log.wanted
            self.keeps_values = log.is_complete or log.keeps_values
        super()._send(command)

    def _complete(self, command: SentCommand, values: Sequence[object], error: BaseException | None) -> None:
        if command.origin is not None:
            self._log.answered(command, values, error)
        super()._complete(command, values, error)

    # -- a loss before anything was told ---------------------------------------------------------------------------

    def _start(self) -> Receiver:
        """Starts the workers; others where some are lost while they join each other."""
        for _ in range(MOST_LOSSES):
            try:
                return super()._start()
            except MeshStartError as error:
                was_lost = isinstance(error.__cause__, (EngineError, WorkerLostError))
                if not was_lost or was_too_slow(error) or self.is_stopped():
                    raise
                logger.say(f"{error.fact} Others start in their place", logger.NOTICE)
                self._prepare_others()
        return super()._start()

    # -- after a loss ----------------------------------------------------------------------------------------------

    def _look_for_lost(self) -> None:
        deadline_s = time.monotonic() + (_DEAD_WITHIN_S if self._log.is_complete else 0.0)
        while True:
            lost = self._launcher.find_dead()
            if lost is not None:
                raise lost
            if time.monotonic() > deadline_s:
                return
            time.sleep(POLL_S)

    def _replace(self, lost: WorkerLostError) -> Receiver:
        started_s, first = time.monotonic(), lost
        with self._lock:
            self._carrier = None  # from here on commands wait, until the others know what was answered
            self._unsent.extendleft(command for command, _ in reversed(self._sent))
            self._sent.clear()
            number = self._unsent[0].number if self._unsent else None
        if not self._log.is_complete and not self._log.why_closed:
            raise lost
        while True:
            reason = self._log.why_not(number)
            if reason:
                fact = f"{first.fact} The run cannot go on: {reason}."
                raise WorkerLostError(fact, first.allowed, first.fix) from first.__cause__
            try:
                receiver, num_steps = self._start_others()
                break
            except (WorkerLostError, MeshStartError) as another:
                lost = WorkerLostError(another.fact, another.allowed, another.fix)
                number = self._last_number if number is None else number  # what is told again may be the cause
        self._log.rules.others_took_over()
        took_s = time.monotonic() - started_s
        steps = f"{num_steps} steps were" if num_steps != 1 else "1 step was"
        who = first.fact.partition(chr(10))[0].removesuffix(" Its last output:")
        self._log.rules.say(f"{who} Others took over: {steps} computed again, {took_s:.1f} s")
        return receiver

    def _start_others(self) -> tuple[Receiver, int]:
        """Starts other workers and tells them all; returns what receives their answers, and the steps in that."""
        self._prepare_others()
        receiver = launch(self._launcher, lambda stage, done, total: None, self._come_first_at_exit, self.is_stopped)
        carrier = receiver.carrier = self._launcher.carrier(self._shared_memory)
        self._resolver = OutcomeResolver()
        answered = self._log.answered_commands()
        on_the_way: deque[tuple[Logged, list[Packed], Awaited]] = deque()
        try:
            for logged in answered:
                on_the_way.append((logged, *self._tell_again(logged, carrier)))
                if len(on_the_way) > _AHEAD:
                    self._compare(*on_the_way.popleft(), receiver)
            while on_the_way:
                self._compare(*on_the_way.popleft(), receiver)
        finally:
            for _, payload, _ in on_the_way:  # these workers have been lost, too
                self._release(payload)
        with self._lock:
            self._carrier = carrier
            for command in self._unsent:
                super()._send(command)  # they were noted when they were submitted
            self._unsent.clear()
        return receiver, sum(logged.num_steps for logged in answered)

    def _prepare_others(self) -> None:
        """Ends the workers, so that others may be launched."""
        if not self._launcher.prepare_again():
            before, self._launcher = self._launcher, self._make_launcher(self._request, self.is_stopped)
            before.end()

    def _release(self, payload: Sequence[Packed]) -> None:
        for packed in payload:
            if packed.buffers:
                self._shared_memory.release(packed.buffers)

    def _tell_again(self, logged: Logged, carrier: Carrier) -> tuple[list[Packed], Awaited]:
        again = self._log.rules.again
        if logged.is_each:
            each = [self._packed(again(one), rank) for rank, one in enumerate(logged.origin)]
            return each, carrier.execute(logged.number, logged.epoch, each)
        packed = self._packed(again(logged.origin))
        return [packed], carrier.execute(logged.number, logged.epoch, packed)

    def _compare(self, logged: Logged, payload: list[Packed], pending: Awaited, receiver: Receiver) -> None:
        """Waits for the answers to a command that was told again, and compares them with those of before.

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
            self._look_for_lost()
        if logged.error is None and outcome.error is None:
            found = self._log.rules.difference(logged.figures, self._log.rules.figures(logged.origin, outcome.values))
        elif logged.error is not None and outcome.error is not None:
            self._resolver.remember(logged.epoch, logged.error)
            found = ""
        else:
            found = f"{_words(logged.error)} before, {_words(outcome.error)} now"
        if found:
            raise ExactnessError(
                f"The workers that took over after a loss do not compute what those before them did: {found}",
                "models whose numbers depend on what the script gives them alone",
                "export MOREH_RECOVERY=off",
                "docs/recovery.md#differences",
            ) from outcome.error


def _words(error: BaseException | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
