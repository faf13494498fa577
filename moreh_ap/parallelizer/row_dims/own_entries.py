"""Arguments that number the entries of a row through the whole batch: negatives of a contrastive loss, masked places.

Decides which tensors do, and what a forward of some rows gets in their place. Whether it is right then is for
`split_check.py` to find out.

[Note: own entries]
``features.view(-1, size)[negatives.view(-1)]`` takes entries of all rows behind each other, by numbers of which those
of row r begin at ``r * length``. A worker has some of the rows: its first one begins at 0. Where each row names
entries of its own only, the numbers of a worker are those of the batch, less what comes before its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.parallelizer.call.extension import CallExtension
from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.protocol.batch import carries_rows

Entries = Sequence[tuple[int, int]]
"""Leaves of arguments that number entries, each with the leaf of which dim 1 has those of a row."""


@dataclass(frozen=True)
class OwnEntries(CallExtension):
    """Has such numbers begin at this worker's first row.

    Args:
        entries: Where they are.
        rows: Which rows this worker computes of the whole batch, of which it gets all numbers; None: it gets the
            numbers of some rows.
    """

    entries: Entries
    rows: range | None = None

    def of_rows(self, start: int, stop: int) -> OwnEntries:
        """Returns the extension of a worker that computes rows `start:stop`."""
        return replace(self, rows=range(start, stop))

    def prepared(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        for place, other in self.entries:
            numbers, length = leaves[place], leaves[other].shape[1]
            first = numbers.flatten(1).amin(1) // length  # which row of the batch each is
            if self.rows is not None:
                if len(numbers) < self.rows.stop or not _are_own(numbers, length):
                    raise Diverged("numbers among the arguments name entries of other rows")
                numbers, first = numbers[self.rows.start : self.rows.stop], first[self.rows.start : self.rows.stop]
            moved = (torch.arange(len(first), device=first.device) - first) * length
            leaves[place] = numbers + moved.view(-1, *[1] * (numbers.ndim - 1)).to(numbers.dtype)
        return tree_unflatten(leaves, spec)  # type: ignore[no-any-return]


def may_number_entries(leaves: Sequence[Any], rows: int) -> Iterator[Entries]:
    """Yields where arguments may number entries through the batch, for each length that a row may have."""
    with_rows = [(at, leaf) for at, leaf in enumerate(leaves) if carries_rows(leaf, rows)]
    lengths = {leaf.shape[1]: at for at, leaf in reversed(with_rows) if leaf.ndim > 1}
    whole = [(at, leaf) for at, leaf in with_rows if leaf.dtype in (torch.int64, torch.int32) and leaf.ndim > 1]
    for length, other in lengths.items():
        places = tuple((at, other) for at, leaf in whole if leaf.numel() and _are_own(leaf, length))
        if places:
            yield places


def _are_own(numbers: Tensor, length: int) -> bool:
    """Says whether each row names entries of its own only."""
    rows = torch.arange(len(numbers), device=numbers.device)
    low, high = torch.aminmax(numbers.flatten(1), dim=1)
    return bool(((low // length == rows) & (high // length == rows)).all())
