"""Which workers live and will never answer.

Decides what is a hang and what only takes long. Must not know what commands do, nor what becomes of the workers.

[Note: what a hang is]
A worker that is silent may compute, compile, read from a slow disk, stand at a breakpoint, or hold the interpreter's
lock in native code for minutes: none of these is a fault, and none can be told from a hang by silence alone. Two things
can. A process that a signal has stopped: the kernel says so, and of one that a debugger holds, it says that. And a
collective that cannot end: every worker that has not answered is in one, and none of them has computed anything for a
while. Whoever could still enter it has answered the command already, or waits in another collective.
Time in which this process did not run either, since all were stopped or the machine slept, does not count.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moreh_ap.runtime.hangs import stack_dumps
from moreh_ap.runtime.hangs.process_looks import STOPPED, TRACED, Look, look_at, processor_s_of_children
from moreh_ap.runtime.hangs.stack_dumps import Frame

HANG_S = 30.0
"""What stands for so long will stand for ever."""

QUIET_S = 0.5
"""Of the processor, which a worker needs meanwhile without doing anything: its threads look up now and then."""

_LOOK_S = 1.0
_DEPTH = 4  # frames of the code that calls a collective, between it and the function that waits
_COLLECTIVES = "/torch/distributed/"
_OURS = ("/torch/", "/moreh_ap/")
_EXECUTES = "/moreh_ap/runtime/worker/"


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
    """Looks at workers while one command is waited for. See [Note: what a hang is]."""

    def __init__(self) -> None:
        self._number = -1
        self._last_s, self._asks_after_s = 0.0, HANG_S
        self._stopped_s: dict[int, float] = {}
        self._begin_again({})

    def _begin_again(self, processor_s: dict[int, float]) -> None:
        self._computed_s = processor_s
        self._quiet_s = 0.0

    def look(self, number: int, pids: Mapping[int, int], answered: Sequence[bool]) -> Hang | None:
        """Returns a hang, if there is one. Called often while a command takes long; most calls do nothing.

        Args:
            number: The command.
            pids: The workers' processes by rank; those of this machine.
            answered: By rank whether a worker has answered the command.
        """
        now_s = time.monotonic()
        if number != self._number:
            self._number, self._last_s, self._stopped_s = number, now_s, dict.fromkeys(pids, 0.0)
            self._asks_after_s = HANG_S
            self._begin_again({})
        if now_s - self._last_s < _LOOK_S:
            return None
        passed_s, self._last_s = min(now_s - self._last_s, 2 * _LOOK_S), now_s
        silent = [rank for rank in pids if not answered[rank]]
        looks = {rank: look for rank in silent if (look := look_at(pids[rank])) is not None}
        if len(looks) < len(silent) or any(look.state == TRACED for look in looks.values()):
            self._begin_again({})
            return None
        for rank, look in looks.items():
            self._stopped_s[rank] = self._stopped_s[rank] + passed_s if look.state == STOPPED else 0.0
            if self._stopped_s[rank] > HANG_S:
                how = f"has been stopped by a signal for {self._stopped_s[rank]:.0f} s (SIGSTOP)"
                return Hang(rank, how, stack_dumps.read(pids))
        return self._look_for_collective(passed_s, looks, pids)

    def _look_for_collective(self, passed_s: float, looks: Mapping[int, Look], pids: Mapping[int, int]) -> Hang | None:
        """Returns a hang in a collective that none of the workers that have not answered will ever leave."""
        computed_s = {rank: look.processor_s for rank, look in looks.items()}
        if not self._is_quiet(computed_s) or any(look.state == STOPPED for look in looks.values()):
            self._begin_again(computed_s)
            return None
        self._quiet_s += passed_s
        if self._quiet_s <= self._asks_after_s or not looks:
            return None
        self._asks_after_s *= 2  # the signal interrupts calls of the system, which not every library expects
        with_children_s = {rank: processor_s_of_children(pids[rank]) for rank in looks}
        stacks = stack_dumps.read(pids)
        waiting = {rank: _collective_of(stacks[rank]) for rank in looks}
        time.sleep(_LOOK_S)
        is_still = with_children_s == {rank: processor_s_of_children(pids[rank]) for rank in looks}
        quiet_s, self._quiet_s = self._quiet_s, 0.0
        if not is_still or None in waiting.values():
            return None
        rank, frame = next((rank, frame) for rank, frame in waiting.items() if frame is not None)
        others = [f"worker {one} in {at.function}" for one, at in waiting.items() if at is not None and one != rank]
        others += [f"worker {one} is through" for one in pids if one not in looks]
        beside = f" ({', '.join(others)})" if others else ""
        return Hang(rank, f"has waited in {frame.function} for {quiet_s:.0f} s, which will never end{beside}", stacks)

    def _is_quiet(self, computed_s: Mapping[int, float]) -> bool:
        before_s = self._computed_s
        return all(rank in before_s and now - before_s[rank] < QUIET_S for rank, now in computed_s.items())


def _collective_of(stacks: str) -> Frame | None:
    """Returns the collective in which the thread waits that executes commands; None if it does something else."""
    for frames in stack_dumps.threads_of(stacks):
        if not any(_EXECUTES in frame.file for frame in frames) or not any(one.function == "serve" for one in frames):
            continue
        innermost = frames[0]
        if any(part in innermost.file for part in _OURS):
            if ".wait(" in linecache.getline(innermost.file, innermost.line):
                return innermost
            return next((frame for frame in frames[:_DEPTH] if _COLLECTIVES in frame.file), None)
    return None
