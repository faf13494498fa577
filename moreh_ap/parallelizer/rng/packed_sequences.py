"""Random numbers of recurrent layers that are given packed sequences: which of them belong to a worker's rows.

Decides where the steps of some rows lie among the packed steps of all. Must not know what is drawn for them.

[Note: packed steps]
Packed, the first steps of all rows come first, then the second steps of those that have one: the longest row first,
and of equally long ones the first of the batch. So the lengths of all rows tell where the steps of some of them lie.
Each worker knows those of its rows, sorted in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RECURRENT = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})
"""Names of torch functions whose second argument, for packed sequences, is how many rows have each step."""


def lengths_in(name: str, args: Sequence[Any]) -> list[int] | None:
    """Returns the lengths of the rows that a torch function gets packed, the longest first; None if it gets none."""
    sizes = args[1] if name in RECURRENT and len(args) > 1 else None
    if not isinstance(sizes, Tensor) or sizes.dtype is not torch.int64 or sizes.ndim != 1:
        return None
    rows_with_step = sizes.tolist()
    return [sum(count > row for count in rows_with_step) for row in range(rows_with_step[0])]


def places_of(ranks: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Returns where the steps of some rows lie among those of all.

    Args:
        ranks: The places of these rows among all, the longest first.
        lengths: The lengths of all rows, likewise.

    Example:
        >>> places_of([1, 2], [3, 2, 1]).tolist()  # a0 b0 c0 a1 b1 a2
        [1, 2, 4]
    """
    of_all, own = torch.tensor(lengths), torch.tensor(ranks)
    places, begin = [], 0
    for step in range(lengths[ranks[0]]):
        places.append(begin + own[of_all[own] > step])
        begin += int((of_all > step).sum())
    return torch.cat(places)


def ranks_of(own: Sequence[int], lengths: Sequence[int], taken: set[int]) -> list[int] | None:
    """Returns the places of rows among all, sorted by length: of equally long ones the first that is not `taken`.

    None if there are no such rows.
    """
    ranks = []
    for length in own:
        rank = next((rank for rank, one in enumerate(lengths) if one == length and rank not in taken), None)
        if rank is None:
            return None
        taken.add(rank)
        ranks.append(rank)
    return ranks
