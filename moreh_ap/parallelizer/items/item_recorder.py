"""Notes the numbers at all places of a forward where items may meet, and what it draws there.

Decides nothing about them; `item_rules.py` compares what forwards of different items noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moreh_ap.parallelizer.items.item_reduction import OWN, ItemSites, Place
from moreh_ap.parallelizer.rng.draw_recording import Drawn, Recording
from moreh_ap.parallelizer.rng.packed_sequences import lengths_in


@dataclass(frozen=True)
class Total:
    """The numbers at a place in the forward of all items, and what they are; see `ItemRules`."""

    rules: tuple[str, ...]
    numbers: tuple[float, ...]

    def of(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Returns the numbers with which a forward of some items goes on as that of all does."""
        return tuple(own if rule == OWN else all_ for rule, all_, own in zip(self.rules, self.numbers, numbers))


@dataclass(frozen=True)
class Noted:
    """A note of one place: `what` it is, and its numbers or draws."""

    what: str
    numbers: tuple[float, ...] = ()
    drawn: tuple[Drawn, ...] = ()


class ItemRecorder(ItemSites):
    """Runs a forward as one device does.

    Args:
        device: This worker's device.
        counts: Whether whole numbers that are sums are looked at.
        totals: The numbers of a forward of more items, as which this one goes on.
        leaves_out_statistics: Batch normalisation, which refuses a single value a channel, returns its input.

    Attributes:
        places: What was noted, in order.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        counts: bool = True,
        totals: Mapping[Place, Total] | None = None,
        leaves_out_statistics: bool = False,
    ) -> None:
        super().__init__(device, record=True)
        self.counts_items = counts
        self.places: dict[Place, Noted] = {}
        self._totals = totals or {}
        self._reached: Counter[int] = Counter()
        self._leaves_out = leaves_out_statistics

    def _place(self, site: int) -> Place:
        place = site, self._reached[site]
        self._reached[site] += 1
        return place

    def numbers_at(self, what: str, site: int, numbers: Sequence[float]) -> Sequence[float]:
        place = self._place(site)
        self.places[place] = Noted(what, tuple(numbers))
        total = self._totals.get(place)
        return numbers if total is None else total.of(numbers)

    def draw_at(self, site: int, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = self._place(site)
        with Recording() as recording:
            result = func(*args, **kwargs)
        are_packed = lengths_in(getattr(func, "__name__", ""), args) is not None
        drawn = tuple(replace(draw, are_packed=are_packed) for draw in recording.drawn)
        self.places[place] = Noted("draw", drawn=drawn)
        return result

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._leaves_out and getattr(func, "__name__", "") == "batch_norm":
            return (args[0] if args else (kwargs or {})["input"]).clone()
        return super().__torch_function__(func, types, args, kwargs)
