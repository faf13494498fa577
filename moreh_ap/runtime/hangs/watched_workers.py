"""The workers that are watched, as who decides what is a hang sees them; and those of this machine.

Must not know what is a hang. Workers of other hosts: `runtime/hangs/workers_of_hosts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from moreh_ap.runtime.hangs import stack_answers
from moreh_ap.runtime.hangs.stack_answers import Said
from moreh_ap.runtime.hangs.worker_sights import Sight, WorkerClocks

LOOK_S = 1.0
"""How often workers are looked at."""


class WatchedWorkers(Protocol):
    """Workers, wherever they are."""

    def silent(self, number: int, answered: Sequence[bool] | None) -> Mapping[int, Sight] | None:
        """Returns what is seen of the workers that have not answered a command, by rank; None where that is not known.

        Args:
            number: The command.
            answered: By rank whether a worker has answered it, empty where that is not known here; None: they join
                each other, and none has.
        """

    def ask(self) -> Mapping[int, Said]:
        """Returns what all workers say of themselves, by rank."""


class WorkersHere:
    """Implements `WatchedWorkers` for processes of this machine.

    Args:
        pids: Their processes, by rank.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids, self._clocks = pids, WorkerClocks(LOOK_S)

    def silent(self, number: int, answered: Sequence[bool] | None) -> Mapping[int, Sight] | None:
        if answered is not None and not answered:  # all have, just now
            return None
        pids = {rank: pid for rank, pid in self._pids.items() if answered is None or not answered[rank]}
        sights = self._clocks.look(pids)
        return sights if len(sights) == len(pids) else None

    def ask(self) -> Mapping[int, Said]:
        return stack_answers.ask(self._pids)
