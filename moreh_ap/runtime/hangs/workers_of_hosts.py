"""The workers of several hosts, as who decides what is a hang sees them: by what agents say, without a message more.

Decides what is known of a command that a host has not answered, and how long it may take to say more. Must not know
what is a hang.

[Note: sights of hosts]
Every few seconds an agent says that it lives, and with it what it sees of its workers (`host_sights.py`): for how long
each has been stopped or has computed nothing, and which have not answered the oldest command that its workers have not
answered. Only once all of this makes a hang likely, agents are asked for the stacks of their workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from moreh_ap.runtime.hangs.stack_answers import Said
from moreh_ap.runtime.hangs.worker_sights import Sight
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError

_SAY_S = 10.0  # how long agents may take to say more: their workers have 4
_POLL_S = 0.05


class WorkersOfHosts:
    """Implements `WatchedWorkers`. See [Note: sights of hosts].

    Args:
        connections: The hosts.
        per_host: Workers of each.
        start: The start of these workers.
    """

    def __init__(self, connections: Sequence[HostConnection], per_host: int, start: int) -> None:
        self._connections, self._per_host, self._start = connections, per_host, start

    def silent(self, number: int, answered: Sequence[bool] | None) -> Mapping[int, Sight] | None:
        found = {}
        for index, one in enumerate(self._connections):
            seen = one.sights
            if seen.get("start") != self._start:
                return None
            sights = {rank: Sight(*sight) for rank, *sight in seen["workers"]}
            first = index * self._per_host
            ranks: Sequence[int] = range(first, first + self._per_host)
            if answered is not None:
                oldest = seen["oldest"]
                if oldest is None or oldest > number:
                    continue
                if oldest < number:  # not since then
                    return None
                ranks = [first + worker for worker in seen["silent"]]
            if not all(rank in sights for rank in ranks):
                return None
            found.update({rank: sights[rank] for rank in ranks})
        return found

    def ask(self) -> Mapping[int, Said]:
        for one in self._connections:
            one.said = None
            with contextlib.suppress(HostLostError):  # who waits for it says so
                one.send("stacks")
        deadline_s = time.monotonic() + _SAY_S
        while any(one.said is None and one.lost() is None for one in self._connections):
            if time.monotonic() > deadline_s:
                break
            time.sleep(_POLL_S)
        said = dict.fromkeys(range(len(self._connections) * self._per_host), Said())
        for one in self._connections:
            said.update({rank: Said(*what) for rank, *what in one.said or ()})
        return said
