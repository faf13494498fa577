"""Arguments and results of a call whose rows do not lie along dim 0: cut before its forward, gathered after it.

Decides how both are done, differentiably. Must not know what happens inside the forward, or who found out where the
rows lie (`placed_probe.py`). Inside the forward nothing is gathered: its rows do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.parallelizer.data.row_gathering import GatherRows
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.row_dims.row_steps import Rows
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.pytree import flatten


class RowsAlong(NamedTuple):
    """Where a result has the rows of a batch.

    Attributes:
        dim: The dim that counts them.
        in_turn: Whether each row has one entry in each of several groups, as where the words of all rows follow each
            other step by step along one dim; otherwise the entries of a row follow each other.
        is_certain: False where rows with one entry each, which both would give, did not tell.
    """

    dim: int
    in_turn: bool = False
    is_certain: bool = True

    def rows_in(self, tensor: Tensor, rows: int) -> Rows:
        """Returns the placement of so many rows in a tensor.

        Raises:
            Diverged: It is not known.
        """
        entries = tensor.shape[self.dim]
        if entries % rows or not (self.is_certain or entries == rows):
            raise Diverged("where a result has its rows is not where it had them when few rows were tried")
        return Rows(self.dim, entries // rows if self.in_turn else 1)


def find_rows(common: Tensor, singles: Sequence[Any], each: int, is_same: Callable[[Tensor], bool]) -> RowsAlong | None:
    """Returns where a result has its rows, None if they do not lie along one dim of it.

    Args:
        common: What the rows together gave.
        singles: What they gave apart, in order.
        each: How many rows ran apart at once.
        is_same: Says whether a tensor is what they gave together.
    """
    first = singles[0]
    if not all(isinstance(one, Tensor) and one.shape == first.shape for one in singles) or first.ndim != common.ndim:
        return None
    grown = [dim for dim in range(first.ndim) if first.shape[dim] != common.shape[dim]]
    if len(grown) != 1:
        return None
    (dim,) = grown
    entries = first.shape[dim]
    if common.shape[dim] != len(singles) * entries or not entries or entries % each:
        return None
    for in_turn in (False, True):
        along = RowsAlong(dim, in_turn, is_certain=entries != each)
        rows = along.rows_in(first, each)
        if is_same(rows.merge(torch.cat([rows.split(one, each) for one in singles], dim + 1))):
            return along
    return None


@dataclass(frozen=True)
class PlacedRows:
    """The tensors that are cut before a forward and gathered after it.

    Attributes:
        rows: Rows of the batch.
        arguments: Where each leaf of the arguments has rows (None: nowhere), if all of them are here; None if they
            have this worker's rows alone.
        results: Where each leaf of the result has rows that are to be gathered; attributes excepted.
        attributes: The same of the attributes that the forward sets, by name.
    """

    rows: int
    arguments: tuple[int | None, ...] | None
    results: tuple[RowsAlong | None, ...]
    attributes: Mapping[str, tuple[RowsAlong | None, ...]] = field(default_factory=dict)

    def take(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], axis: Axis) -> tuple[tuple[Any, ...], Any]:
        """Returns the arguments with this worker's rows."""
        if self.arguments is None:
            return args, kwargs
        start, stop = row_range(axis.rank, axis.size, self.rows)
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        cut = [
            leaf if dim is None else Rows(dim).narrow(leaf, self.rows, start, stop)
            for leaf, dim in zip(leaves, self.arguments, strict=True)
        ]
        return tree_unflatten(cut, spec)  # type: ignore[no-any-return]

    def gather(self, result: Any, attributes: Mapping[str, int], settled: Callable[[Any], Any], axis: Axis) -> Any:
        """Returns the result with the rows of all workers. A collective.

        Args:
            result: What the forward returned, with attributes behind it.
            attributes: How many leaves each of those has.
            settled: To be called with what other tensors are made of.
            axis: The workers that share the batch.

        Raises:
            Diverged: The result is not like that of the rows that were tried.
        """
        leaves, spec = flatten(result)
        places = [*self.results, *self._of_attributes(attributes)]
        if len(places) != len(leaves):
            raise Diverged("the result has other parts than when a few rows were tried")
        start, stop = row_range(axis.rank, axis.size, self.rows)
        own = stop - start

        def gathered(leaf: Any, along: RowsAlong | None) -> Any:
            if along is None:
                return leaf
            rows = along.rows_in(leaf, own)
            split = rows.split(settled(leaf), own)
            return rows.merge(GatherRows.apply(split, rows.dim + 1, self.rows, axis))

        return tree_unflatten([gathered(leaf, along) for leaf, along in zip(leaves, places, strict=True)], spec)

    def _of_attributes(self, attributes: Mapping[str, int]) -> Iterator[RowsAlong | None]:
        for name, number in attributes.items():
            yield from self.attributes.get(name, (None,) * number)
