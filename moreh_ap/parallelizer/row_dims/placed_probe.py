"""A few rows run together and one by one, with results, or arguments too, whose rows do not lie along dim 0.

Decides where each result has its rows. Must not know what follows from it (`trial/split_check.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moreh_ap.parallelizer.row_dims.placed_rows import find_rows
from moreh_ap.parallelizer.trial.dry_run import Refused, may_pad
from moreh_ap.parallelizer.trial.joined_probe import JoinedProbe
from moreh_ap.parallelizer.trial.probe import Probe
from moreh_ap.parallelizer.trial.row_comparison import choose_rows, close


class _Placing(Probe):
    """A result with rows is gathered, where they lie along another dim or those of arguments do.

    Attributes:
        places: Where results have rows that are gathered, by number; their kind is "same".
    """

    def _choose_rows(self) -> list[int]:
        self.turned = any(self.dims)
        if not self.turned or self.each > 1:
            return super()._choose_rows()
        rows_first = [leaf if dim is None else leaf.movedim(dim, 0) for leaf, dim in zip(self._leaves, self.dims)]
        return choose_rows(
            [leaf for leaf, dim in zip(rows_first, self.dims) if dim is not None],
            self.rows,
            may_pad=may_pad(self.call.module),
        )

    def _kind(self, index: int, name: str, leaf: Any, singles: Sequence[Any]) -> str:
        kind, refused = "rows", None
        try:
            kind = super()._kind(index, name, leaf, singles)
        except Refused as refusal:
            refused = refusal
        if not isinstance(leaf, Tensor) or not (refused or (kind == "rows" and self.turned)):
            if refused is not None:
                raise refused
            return kind
        each = len(self.chosen) // len(singles)
        along = find_rows(leaf, singles, each, lambda one: close(one, leaf, self._tolerance_of(index)))
        if along is None:
            raise refused or Refused(f"where {name} has its rows is not clear")
        self.places[index] = along
        return "same"

    def _share_of(self, position: int, number: int) -> list[Tensor | None]:
        shares, each = super()._share_of(position, number), len(self.chosen) // number
        for index, along in self.places.items():
            weight = self._weights[index]
            if weight is not None:
                rows = along.rows_in(weight, number * each)
                shares[index] = rows.narrow(weight, number * each, position * each, (position + 1) * each)
        return shares


class PlacedProbe(_Placing):
    """As `Probe`, with such results."""


class PlacedJoinedProbe(_Placing, JoinedProbe):
    """As `JoinedProbe`, with such results."""
