"""Waiting for the workers' answers, in such a way that a wait always ends.

Decides when a wait is hopeless: a process died, a worker hangs, or one failed and the others wait for it.
Must not know what is done about it, nor what commands mean.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moreh_ap.errors import WorkerLostError
from moreh_ap.local import logger
from moreh_ap.protocol.encoding import Packed, unpack
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.hangs.hang_watch import HangWatch
from moreh_ap.runtime.launcher import POLL_S, Launcher, Stopping
from moreh_ap.runtime.outcome_resolver import PeersHang
from moreh_ap.runtime.relay.carrier import Awaited, Carrier
from moreh_ap.runtime.relay.worker_answer import DONE, Answer
from moreh_ap.runtime.worker.actor import Trouble

if TYPE_CHECKING:
    from moreh_ap.runtime.engine import Engine, Pending

LOOK_AFTER_S = 1.0  # a command that takes longer than this may be hanging: ask the workers
_LAST = (1 << 63) - 1  # the number of the last command that a group of workers gets
GRACE_S = 3.0  # how long the others may still answer once a worker is known to have failed


class Receiver:
    """Receives the answers of the workers that a launcher started.

    Attributes:
        carrier: What carries commands, once that is known.
    """

    def __init__(self, launcher: Launcher, engine: Engine, is_stopping: Callable[[], bool]) -> None:
        self._launcher, self._engine, self._is_stopping = launcher, engine, is_stopping
        self.carrier: Carrier | None = None
        self._looks: dict[int, Pending[Trouble | None]] = {}
        self._hangs = HangWatch(launcher.watched)

    def receive(self, number: int, epoch: int, pending: Awaited) -> Sequence[Answer]:
        """Waits for the answers of all workers to command `number` of `epoch`, in rank order.

        Raises:
            WorkerLostError: a process died, or hangs.
            PeersHang: a worker failed, and the others have not answered within `GRACE_S`.
            Stopping: the worker group is being closed.
        """
        started_s = time.monotonic()
        failed: tuple[float, Answer] | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                try:
                    return pending.wait(POLL_S)
                except EngineError as error:
                    raise self._lost(error) from error
            self.look_around()
            now_s = time.monotonic()
            if failed is not None:
                if now_s - failed[0] > GRACE_S:
                    raise PeersHang(failed[1])
            elif now_s - started_s > LOOK_AFTER_S:
                answer = self._find_failure(number, epoch)
                failed = (now_s, answer) if answer is not None else None
                if failed is None:
                    self._look_for_hang(number)

    def ask(self, epoch: int, rank: int, command: object) -> object:
        """Sends the last command, and returns the answer of one of this machine's workers; None if it has none.

        The others are not waited for: they may wait in a collective for ever.

        Raises:
            Stopping: the worker group is being closed.
        """
        assert self.carrier is not None, "workers have answered"
        try:
            pending = self.carrier.execute(_LAST, epoch, Packed(pickle.dumps(command)))
            while (answer := pending.answers[rank]) is None:
                with contextlib.suppress(TimeoutError):
                    pending.wait(POLL_S)
                self.look_around()
        except (EngineError, WorkerLostError):
            return None  # the error before this one is what the script gets
        return unpack(answer.content) if answer.status == DONE and answer.content is not None else None

    def look_around(self) -> None:
        """Raises `Stopping` or `WorkerLostError` if there is nothing left to wait for."""
        if self._is_stopping():
            raise Stopping
        lost = self._launcher.find_dead()
        if lost is not None:
            raise lost

    def _look_for_hang(self, number: int) -> None:
        """Raises `WorkerLostError` if a worker will never answer a command, with all workers' stacks in the log."""
        answered = None if self.carrier is None else self.carrier.answered(number)
        hang = self._hangs.look(number, answered)
        if hang is None:
            return
        for rank, stacks in hang.stacks.items():
            text = stacks.strip() or "(it does not say)"
            logger.say(f"{self._launcher.describe(rank)}, its Python stacks:\n{text}", logging.WARNING)
        raise WorkerLostError(
            f"{self._launcher.describe(hang.rank)} {hang.how}. The stacks of all workers are in the log.",
            "workers that answer, however late",
            "kill -CONT PROCESS  # before, where you have stopped it",
            "docs/recovery.md#hangs",
        )

    def _find_failure(self, number: int, epoch: int) -> Answer | None:
        """Returns the answer with which a worker failed, in this command or in one because of which it skips this one.

        Does not wait: what is asked in one turn is read in a later one, since a worker that is deep in native code
        answers late.
        """
        if self.carrier is not None:  # workers tell by themselves
            return next((one.answer for one in self.carrier.troubles() if _explains(one, number, epoch)), None)
        found = None
        for rank in range(len(self._launcher.pids)):
            look = self._looks.get(rank)
            try:
                if look is None:
                    self._looks[rank] = self._engine.trouble(rank)
                    continue
                (trouble,) = look.wait(0.0)
            except TimeoutError:
                continue
            except EngineError as error:
                raise self._lost(error) from error
            del self._looks[rank]
            if found is None and trouble is not None and _explains(trouble, number, epoch):
                found = trouble.answer
        return found

    def _lost(self, error: EngineError) -> WorkerLostError:
        return self._launcher.find_dead() or WorkerLostError(f"The workers cannot be reached any more: {error}")


def _explains(trouble: Trouble, number: int, epoch: int) -> bool:
    """Returns whether a failure is that of a command, or of an earlier one because of which it is skipped."""
    return trouble.epoch == epoch and trouble.number <= number
