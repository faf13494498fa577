"""Turns in which rows, and the workers that have them, draw from the streams of Python and NumPy.

Decides where the streams are when a worker's turn begins, and where all workers go on. Must not know what is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.routed_rows import KnownCounts
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.protocol.rng_state import set_state_of_host, state_of_host


class Turns(Protocol):
    """The turns of a forward, one call site after the other."""

    def begin(self, site: int, share: Share) -> bool:
        """Sets the streams to the state before the first of these rows; False if other workers are at another place."""

    def after(self, row: int) -> None:
        """Called when a row has drawn; `row` is the next one."""

    def end(self, share: Share) -> None:
        """Sets the streams to the state after the last row of the batch."""


class KnownTurns:
    """Turns whose states are known from an earlier forward of all rows in this process; the first one is that.

    Attributes:
        counts: How many of those rows were routed to the same place.
    """

    def __init__(self) -> None:
        self.counts = KnownCounts()
        self._states: dict[tuple[int, int], bytes] = {}
        self._place = 0

    def restart(self) -> None:
        """Starts the turns of another forward."""
        self._place = 0
        self.counts.restart()

    def begin(self, site: int, share: Share) -> bool:
        self.after(share.start)
        return True

    def after(self, row: int) -> None:
        known = self._states.setdefault((self._place, row), state_of_host())
        set_state_of_host(known)

    def end(self, share: Share) -> None:
        self.after(share.total)
        self._place += 1


class NotedTurns:
    """The same turns, of which `known` learns the next one, to repeat it; for one place."""

    def __init__(self, turns: Turns, known: KnownTurns) -> None:
        self._turns, self._known = turns, known

    def begin(self, site: int, share: Share) -> bool:
        begins = self._turns.begin(site, share)
        return begins and self._known.begin(site, share)

    def after(self, row: int) -> None:
        self._turns.after(row)
        self._known.after(row)

    def end(self, share: Share) -> None:
        self._turns.end(share)
        self._known.end(share)
        self._known.restart()


class WorkerTurns:
    """The turns of workers that each have some rows. Every method but `after` is a collective.

    Args:
        axis: The workers.
        is_common: Says whether all workers are at a place.
        device: Over which a state travels.
    """

    def __init__(self, axis: Axis, is_common: Callable[[int], bool], device: Any) -> None:
        self._axis, self._is_common, self._device = axis, is_common, device

    def begin(self, site: int, share: Share) -> bool:
        if not self._is_common(site):
            return False
        self._take(range(self._axis.rank))
        return True

    def after(self, row: int) -> None:
        """Workers do not wait for single rows."""

    def end(self, share: Share) -> None:
        self._take(range(self._axis.rank, self._axis.size))

    def _take(self, ranks: range) -> None:
        """Goes on from where the workers of these ranks leave the streams."""
        for rank in ranks:
            state = [state_of_host()]
            dist.broadcast_object_list(state, group=self._axis.group, group_src=rank, device=self._device)
            set_state_of_host(state[0])
