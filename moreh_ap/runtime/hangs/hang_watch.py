"""Which workers live and will never answer.

Decides what is a hang and what only takes long. Must not know what commands do, what becomes of the workers, nor on
which machine they are.

[Note: what a hang is]
A worker that is silent may compute, compile, read from a slow disk, wait at a breakpoint, or hold the interpreter's
lock in native code for minutes: none of these is a fault, and none can be told from a hang by silence alone. Two things
can. A process that a signal has stopped: the kernel says so, and of one that a debugger holds, it says that. And a
collective that cannot end: every worker that has not answered is in one, and none of them has computed anything for a
while. Whoever could still enter it has answered the command already, or waits in another collective.
Time in which this process did not run either, since all were stopped or the machine slept, does not count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moreh_ap.runtime.hangs.stack_answers import Said
from moreh_ap.runtime.hangs.watched_workers import LOOK_S, WatchedWorkers

HANG_S = 30.0
"""A worker that makes no progress for so long counts as hanging."""


class Hang(NamedTuple):
    """What was found.

    Attributes:
        rank: A worker that hangs.
        how: What it does, to follow its name.
        stacks: Of all workers, by rank.
    """

    rank: int
    how: str
    stacks: dict[int, str]


class HangWatch:
    """Looks at workers while one command is waited for. See [Note: what a hang is].

    Args:
        workers: The workers.
    """

    def __init__(self, workers: WatchedWorkers) -> None:
        self._workers = workers
        self._number = -1
        self._last_s, self._asks_after_s = 0.0, HANG_S
        self._waited_s = self._begun_s = 0.0  # of that, when they were asked last or not all could be looked at

    def look(self, number: int, answered: Sequence[bool] | None) -> Hang | None:
        """Returns a hang, if there is one. Called often while a command takes long; most calls do nothing.

        Args:
            number: The command.
            answered: As for `WatchedWorkers.silent`.
        """
        now_s = time.monotonic()
        if number != self._number:
            self._number, self._last_s, self._asks_after_s = number, now_s, HANG_S
            self._waited_s = self._begun_s = 0.0
        if now_s - self._last_s < LOOK_S:
            return None
        self._waited_s += min(now_s - self._last_s, 2 * LOOK_S)
        self._last_s = now_s
        sights = self._workers.silent(number, answered)
        if sights is None or any(one.is_traced for one in sights.values()):
            self._begun_s = self._waited_s
            return None
        for rank, sight in sights.items():
            stopped_s = min(self._waited_s, sight.stopped_s)
            if stopped_s > HANG_S:
                how = f"has been stopped by a signal for {stopped_s:.0f} s (SIGSTOP)"
                return Hang(rank, how, _stacks_of(self._workers.ask()))
        quiet_s = min([self._waited_s - self._begun_s, *(one.quiet_s for one in sights.values())])
        if not sights or quiet_s <= self._asks_after_s:
            return None
        self._asks_after_s *= 2  # the signal interrupts calls of the system, which not every library expects
        self._begun_s = self._waited_s
        return _hang_in_collective(list(sights), self._workers.ask(), quiet_s)


def _hang_in_collective(silent: Sequence[int], said: Mapping[int, Said], quiet_s: float) -> Hang | None:
    """Returns a hang in a collective that none of the workers that have not answered will ever leave."""
    waiting = {rank: said[rank].waits_in for rank in silent}
    if not all(waiting.values()) or not all(said[rank].is_still for rank in silent):
        return None
    rank, function = next(iter(waiting.items()))
    others = [f"worker {one} in {at}" for one, at in waiting.items() if one != rank]
    others += [f"worker {one} is through" for one in said if one not in waiting]
    beside = f" ({', '.join(others)})" if others else ""
    how = f"has waited in {function} for {quiet_s:.0f} s, which will never end{beside}"
    return Hang(rank, how, _stacks_of(said))


def _stacks_of(said: Mapping[int, Said]) -> dict[int, str]:
    return {rank: one.stacks for rank, one in said.items()}
