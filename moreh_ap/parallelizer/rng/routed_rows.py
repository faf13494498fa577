"""How many rows are routed to the same place in the code, or how long they are: on other workers, or in other runs.

Decides which of all of them are here. Must not know what is drawn for them. See [Note: routed rows] in
`shared_draws.py`.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.observation.call_sites import site_of_call
from moreh_ap.parallelizer.rng.packed_sequences import ranks_of
from moreh_ap.parallelizer.rng.shared_draws import Draw, Share, SharedDraws, UnsharedDraw

_AT_MODULE = zlib.crc32(b"a module in which workers wait for each other")


class KnownCounts:
    """Counts that are known from a run of all rows in this process; later ones have some of the rows each, in order.

    Where nobody's rows are routed, nothing is drawn, and the stream is at the next draw where it was at this one: they
    are told apart by how often a run has been there.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[int, int], Sequence[int]] = {}
        self._taken: dict[tuple[int, int], Sequence[int]] = {}
        self._times: Counter[int] = Counter()
        self._lengths: dict[int, tuple[Sequence[int], set[int]]] = {}

    def add_up(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """See `Counts`.

        Raises:
            UnsharedDraw: All rows together were routed otherwise.
        """
        nothing = [0] * len(own)
        place = state, self._times[state]
        self._times[state] += 1
        if (share.start, share.stop) == (0, share.total):
            self._totals[place] = own
            return nothing, own
        before = self._taken.get(place, nothing) if share.start else nothing
        totals = self._totals.get(place, nothing)
        self._taken[place] = [first + count for first, count in zip(before, own, strict=True)]
        if any(taken > total for taken, total in zip(self._taken[place], totals, strict=True)):
            raise UnsharedDraw("how many rows are routed to where random numbers are drawn depends on other rows")
        return before, totals

    def restart(self) -> None:
        """A run begins."""
        self._times.clear()

    def rank(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """See `Counts`.

        Raises:
            UnsharedDraw: All rows together had other lengths.
        """
        if (share.start, share.stop) == (0, share.total):
            self._lengths[state] = own, set()
            return range(len(own)), own
        lengths, taken = self._lengths.get(state, ((), set()))
        if share.start == 0:
            taken.clear()
        ranks = ranks_of(own, lengths, taken)
        if ranks is None:
            raise UnsharedDraw("how long packed sequences are depends on other rows")
        return ranks, lengths


class WorkerCounts:
    """Counts that workers tell each other. Its method is a collective.

    Args:
        axis: The workers.
        is_common: Says whether all workers are at a place; where they are not, the forward goes on to where they learn
            that its numbers are of no use.
        device: Over which counts travel.
        gathering: The class of modules in which workers wait for each other; None if the model has none.
    """

    def __init__(
        self,
        axis: Axis,
        is_common: Callable[[int], bool],
        device: torch.device,
        gathering: type[Any] | None = None,
    ) -> None:
        self._axis, self._is_common, self._device, self._gathering = axis, is_common, device, gathering

    def add_up(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """See `Counts`."""
        nothing = [0] * len(own)
        if not self._is_common(site_of_call()):
            return nothing, own
        counts = torch.zeros(self._axis.size, len(own), dtype=torch.int64, device=self._device)
        counts[self._axis.rank] = torch.tensor(own)
        dist.all_reduce(counts, group=self._axis.group)
        before: list[int] = counts[: self._axis.rank].sum(0).tolist()
        totals: list[int] = counts.sum(0).tolist()
        return before, totals

    def rank(self, state: int, own: Sequence[int], share: Share) -> tuple[Sequence[int], Sequence[int]]:
        """See `Counts`."""
        if not self._is_common(site_of_call()):
            return range(len(own)), own
        by_row = torch.zeros(share.total, dtype=torch.int64, device=self._device)
        by_row[share.start : share.stop] = torch.tensor(own)
        dist.all_reduce(by_row, group=self._axis.group)
        order = by_row.argsort(descending=True, stable=True)
        place_of_row = order.argsort()
        return place_of_row[share.start : share.stop].tolist(), by_row[order].tolist()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, workers come to such modules together, also one that draws for routed rows more often."""
        if self._gathering is None:
            yield
            return
        hook = register_module_forward_pre_hook(self._before_module)
        try:
            yield
        finally:
            hook.remove()

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if self._gathering is not None and isinstance(module, self._gathering):
            with torch._C.DisableTorchFunction():  # that workers wait is no step of a forward
                while not self._is_common(_AT_MODULE):
                    continue


def drawn_in_turn(draws: Sequence[Draw], total: int) -> Callable[[int, int], AbstractContextManager[Any]]:
    """Returns what gives the surroundings of runs of some rows in this process, which draw what a run of all of them
    has drawn for these rows. That has to be the first.

    Args:
        draws: What is drawn; without any, such runs have no surroundings.
        total: How many rows there are.
    """
    counts = KnownCounts()

    def surroundings(start: int, stop: int) -> AbstractContextManager[Any]:
        counts.restart()
        return SharedDraws(draws, Share(start, stop, total), counts) if draws else nullcontext()

    return surroundings
