"""How long workers have been stopped or have computed nothing, as whoever is on their machine sees it.

Decides from single looks what lasts. Must not know what is a hang, nor who asks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from moreh_ap.runtime.hangs.process_looks import STOPPED, TRACED, look_at

QUIET_S = 0.5
"""Of the processor, which a worker needs meanwhile without doing anything: its threads look up now and then."""


class Sight(NamedTuple):
    """A worker at one moment, and what has lasted until then.

    Attributes:
        is_traced: Whether a debugger holds it.
        stopped_s: For how long it has been seen to be stopped by a signal; 0 if it is not.
        quiet_s: For how long it has computed no more than `QUIET_S`; 0 while a signal or a debugger holds it.
    """

    is_traced: bool
    stopped_s: float
    quiet_s: float


@dataclass
class _Clock:
    """What was seen of a process. Attributes: as of `Sight`; `computed_s` when it began to be quiet."""

    computed_s: float
    is_stopped: bool = False
    stopped_s: float = 0.0
    quiet_s: float = 0.0


class WorkerClocks:
    """Looks at processes of this machine again and again. Time between looks that are far apart does not count.

    Args:
        look_s: How often it is done.
    """

    def __init__(self, look_s: float) -> None:
        self.look_s = look_s
        self._clocks: dict[int, _Clock] = {}  # by process
        self._last_s = time.monotonic()

    def look(self, pids: Mapping[int, int]) -> dict[int, Sight]:
        """Returns what is seen of processes, by whatever they are given by; without those of which nothing is known."""
        now_s = time.monotonic()
        passed_s, self._last_s = min(now_s - self._last_s, 2 * self.look_s), now_s
        before, self._clocks = self._clocks, {}
        found = {}
        for key, pid in pids.items():
            seen = look_at(pid)
            if seen is None:
                continue
            clock = self._clocks[pid] = before.get(pid) or _Clock(seen.processor_s)
            is_stopped, is_traced = seen.state == STOPPED, seen.state == TRACED
            clock.stopped_s = clock.stopped_s + passed_s if is_stopped and clock.is_stopped else 0.0
            clock.is_stopped = is_stopped
            is_quiet = pid in before and seen.processor_s - clock.computed_s < QUIET_S
            if is_quiet and not (is_stopped or is_traced):
                clock.quiet_s += passed_s
            else:
                clock.computed_s, clock.quiet_s = seen.processor_s, 0.0
            found[key] = Sight(is_traced, clock.stopped_s, clock.quiet_s)
        return found
