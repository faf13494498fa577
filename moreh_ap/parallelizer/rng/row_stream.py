"""Random numbers that a forward draws for each item, or for rows of which items have unequal numbers.

Decides in which order workers draw from the one stream. Must not know models or what items are.

[Note: rounds]
A loop over the items that draws (samples of each picture's anchors) goes on from where the item before has left the
stream, and how much an item draws depends on its values. So workers take turns: each draws for its items, and tells
where the stream is then. What a loop draws is a round; it ends when every worker has drawn for all its items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.drawing_operations import shape_drawn
from moreh_ap.parallelizer.rng.packed_sequences import lengths_in
from moreh_ap.parallelizer.rng.routed_rows import WorkerCounts
from moreh_ap.parallelizer.rng.shared_draws import Counts, Draw, Here, Rows, Share, SharedDraws, Sharing


@dataclass(frozen=True)
class Round:
    """A loop over items in which each draws.

    Attributes:
        sites: The places in the code where it does, in order.
    """

    sites: tuple[int, ...]


class RowStream:
    """The stream that workers draw from in turn.

    Args:
        axis: The workers.
        rounds: The loops of the forward in which items draw, in order.
        device: Of what the workers send each other.
    """

    def __init__(self, axis: Axis, rounds: Sequence[Round], device: torch.device) -> None:
        self._axis, self._rounds, self._device = axis, rounds, device
        self._sites = {site for one in rounds for site in one.sites}
        self._next = 0
        self._left = 0
        self._order: tuple[int, ...] = ()
        self._waits = False

    def is_for_each_item(self, site: int) -> bool:
        """Says whether each item draws at this place."""
        return site in self._sites

    def begins_round(self, site: int) -> bool:
        """Says whether the next round begins at this place."""
        return not self._left and self._next < len(self._rounds) and self._rounds[self._next].sites[0] == site

    def goes_on(self, site: int) -> bool:
        """Says whether this place is where the round goes on."""
        return bool(self._left) and self._order[-self._left % len(self._order)] == site

    def begin(self, items: int) -> None:
        """The next round begins, in which `draw_for_item` waits for its turn; this worker has so many items."""
        self._order = self._rounds[self._next].sites
        self._next += 1
        self._left, self._waits = items * len(self._order), True

    def draw_for_item(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Returns what a function gives that draws for an item, in its turn."""
        if self._waits:
            self._waits = False
            self._take(range(self._axis.rank))
        result = func(*args, **kwargs)
        if self._left:
            self._left -= 1
            if not self._left:
                self._take(range(self._axis.rank, self._axis.size))
        return result

    def close(self) -> bool:
        """Ends a round that has not drawn all of its numbers, so that no row waits; returns whether there was one."""
        if not self._left:
            return False
        self._take(range(0 if self._waits else self._axis.rank, self._axis.size))
        self._left, self._waits = 0, False
        return True

    def _take(self, turns: range) -> None:
        """Goes on from where the workers of these turns leave the stream."""
        for rank in turns:
            state = torch.default_generator.get_state().to(self._device)
            dist.broadcast(state, group=self._axis.group, group_src=rank)
            torch.default_generator.set_state(state.cpu())

    def draw_rows(
        self, draws: Sequence[Draw], func: Callable[..., Any], args: Any, kwargs: Any, rows_of: Callable[[int], Tensor]
    ) -> Any:
        """Returns what a function gives that draws rows of all items at once, of which this worker has some.

        Args:
            draws: How the rows lie in what it draws.
            func: The function.
            args: Its positional arguments, for this worker's rows.
            kwargs: Its keyword arguments, likewise.
            rows_of: Returns how many rows each worker has, given this worker's number of them. A collective.
        """
        mode = _Rows(draws, self._axis.rank, rows_of)
        with Sharing(mode):
            return func(*args, **kwargs)

    def draw_packed(self, draws: Sequence[Draw], func: Callable[..., Any], args: Any, kwargs: Any, share: Share) -> Any:
        """Returns what a recurrent function gives that draws for packed sequences. A collective.

        Args:
            draws: How the steps lie in what it draws.
            func: The function.
            args: Its positional arguments, for this worker's sequences.
            kwargs: Its keyword arguments, likewise.
            share: Which of all sequences these are.
        """
        counts = WorkerCounts(self._axis, lambda _: True, self._device)
        lengths = lengths_in(getattr(func, "__name__", ""), args)
        with Sharing(_Packed(draws, share, counts, lengths)):
            return func(*args, **kwargs)


class _Packed(SharedDraws):
    """Finds out with the first draw which steps of all sequences are here."""

    def __init__(self, draws: Sequence[Draw], share: Share, counts: Counts, lengths: list[int] | None) -> None:
        super().__init__(draws, share, counts)
        self._lengths = lengths
        self._rows = next(draw.rows for draw in draws if draw.rows is not None)
        self._here: Here | None = None

    def _rows_of(self, name: str, drawn: Sequence[int], kwargs: dict[str, Any]) -> tuple[Rows, Here]:
        if self._here is None:
            self._here = self._packed_here(0, math.prod(drawn[:-1]))
        return self._rows, self._here


class _Rows(SharedDraws):
    """Finds out with the first draw how many rows each worker has."""

    def __init__(self, draws: Sequence[Draw], rank: int, counts_of: Callable[[int], Tensor]) -> None:
        super().__init__(draws, Share(0, 1, 1))
        self._rank, self._counts_of = rank, counts_of

    def draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._next == 0 and not self._is_drawing:
            rows = next(draw.rows for draw in self._draws if draw.rows is not None)
            counts = list(map(int, self._counts_of(shape_drawn(func, args, kwargs)[rows.dim]).tolist()))
            start = sum(counts[: self._rank])
            self._share = Share(start, start + counts[self._rank], sum(counts))
        return super().draw(func, args, kwargs)
