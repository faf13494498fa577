"""How a batch is cut into the rows of each worker.

Decides what the rows of a batch are and which worker gets which. Must not know models, losses or processes.
"Leaves" are the flat list that `torch.utils._pytree.tree_flatten` makes of a call's arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_MOST_NUMBERS = 16
"""Entries of a tensor among the arguments that may be coefficients or flags: more are data, such as a mask."""


def num_rows(leaves: Sequence[Any]) -> int | None:
    """Returns the size of dim 0 of the first tensor with dims, None where there is no such tensor."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.ndim >= 1:
            return leaf.shape[0]
    return None


def row_range(rank: int, world: int, rows: int) -> tuple[int, int]:
    """Returns the first row of a worker and the one after its last.

    The rows are contiguous and as even as can be; the first workers get the odd ones.

    Example:
        >>> [row_range(rank, 3, 8) for rank in range(3)]
        [(0, 3), (3, 6), (6, 8)]
    """
    each, extra = divmod(rows, world)
    start = rank * each + min(rank, extra)
    return start, start + each + (rank < extra)


def local_entries(tensor: torch.Tensor, rank: int, world: int, rows: int) -> torch.Tensor:
    """Returns a worker's slice of a tensor whose dim 0 has one or several consecutive entries for each row, or one for
    several rows (a convolution that merges four steps)."""
    entries = tensor.shape[0]
    start, stop = row_range(rank, world, rows)
    return tensor[start * entries // rows : stop * entries // rows]


def slice_rows(leaves: Sequence[Any], rows: int, start: int, stop: int) -> list[Any]:
    """Returns the leaves with every tensor of `rows` rows cut to rows `start:stop`; all others stay whole."""
    return [leaf[start:stop] if carries_rows(leaf, rows) else leaf for leaf in leaves]


def select_rows(leaves: Sequence[Any], rows: int, chosen: Sequence[int]) -> list[Any]:
    """Returns the leaves with every tensor of `rows` rows cut to the chosen rows; all others stay whole."""
    return select_rows_along(leaves, row_dims(leaves, rows), chosen)


def select_rows_along(leaves: Sequence[Any], dims: Sequence[int | None], chosen: Sequence[int]) -> list[Any]:
    """Returns copies of the leaves, every tensor cut to the chosen rows along its dim; those without (None) are whole.

    A forward may change any of them in place, as it does with the counter of a cache.
    """
    return [
        _copy_of(leaf) if dim is None else _rows_of(leaf, dim, chosen) for leaf, dim in zip(leaves, dims, strict=True)
    ]


def _copy_of(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def row_dims(leaves: Sequence[Any], rows: int) -> list[int | None]:
    """Returns for each leaf where it has rows: dim 0 if that counts them, else nowhere (None)."""
    return [0 if carries_rows(leaf, rows) else None for leaf in leaves]


def row_dims_elsewhere(leaves: Sequence[Any]) -> list[list[int | None]]:
    """Returns where the leaves may have their rows if not all that have any have them along dim 0.

    Either the first tensor with two dims has them along dim 1, as time-first models do: then a tensor that counts as
    many along dim 1 has its rows there too, and one that does so along dim 0 (a mask, labels) there. Or the first
    tensor has them along dim 0, and others (hidden states of a recurrent layer) along the first dim that counts as
    many. Each is followed by the same with what has as many rows as columns left whole: masks of as many steps as the
    batch has rows.
    """
    found: list[list[int | None]] = []
    for place in (1, 0):
        first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim >= place + 1), None)
        if first is not None:
            dims = [_dim_of(leaf, first.shape[place], place) for leaf in leaves]
            found += [dims] if any(dims) else []  # none is another than 0: those are tried anyway
            without_masks = [
                None if leaf is not first and is_square(leaf) else dim for leaf, dim in zip(leaves, dims, strict=True)
            ]
            found += [without_masks] if without_masks != dims else []
    return found


def rows_elsewhere(leaves: Sequence[Any], fewest: int) -> Iterator[tuple[list[int | None], int]]:
    """Yields where the leaves may have their rows other than along dim 0, and how many: `fewest` at least."""
    for dims in row_dims_elsewhere(leaves):
        rows = rows_along(leaves, dims)
        if rows is not None and rows >= fewest:
            yield dims, rows


def row_dims_without_weights(leaves: Sequence[Any]) -> list[int | None] | None:
    """Returns where the leaves have their rows if only the first tensor and integers, such as labels, have any.

    Other tensors of as many entries along dim 0 are then weights which the script computes: layers have as many outputs
    as the batch has rows. None if no others have.
    """
    rows = num_rows(leaves)
    dims = [] if rows is None else row_dims(leaves, rows)
    first = next((at for at, dim in enumerate(dims) if dim == 0), None)
    without = [
        None if dim == 0 and at != first and leaves[at].is_floating_point() else dim for at, dim in enumerate(dims)
    ]
    return without if without != dims else None


def are_numbers(leaf: Any) -> bool:
    """Says whether a leaf is a tensor of a few numbers, such as coefficients; of whole ones, one without dims."""
    return isinstance(leaf, torch.Tensor) and is_shape_of_numbers(leaf.shape, leaf.dtype)


def is_shape_of_numbers(shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Says whether a tensor of this shape is a few numbers; see `are_numbers`."""
    return len(shape) == 0 or (math.prod(shape) <= _MOST_NUMBERS and (dtype.is_floating_point or dtype is torch.bool))


def is_square(leaf: Any) -> bool:
    """Says whether a leaf is a tensor with as many rows as columns, such as a mask, also ``[steps, steps, 1]``."""
    return isinstance(leaf, torch.Tensor) and leaf.ndim > 1 and leaf.shape[0] ** 2 == leaf.shape[1] ** 2 == leaf.numel()


def are_single_rows(leaves: Sequence[Any], rows: int) -> bool:
    """Says whether the tensors whose dim 0 counts the rows have no other dim, or are a time-first batch of one row.

    In the latter dim 0 counts steps, as the words of one sentence, and dim 1 the single row.
    """
    rowed = [leaf for leaf in leaves if carries_rows(leaf, rows)]
    is_time_first = any(leaf.ndim > 2 and leaf.shape[1] == 1 for leaf in rowed)
    return all(leaf.ndim == 1 or (is_time_first and (leaf.shape[1] == 1 or is_square(leaf))) for leaf in rowed)


def _dim_of(leaf: Any, rows: int, first: int) -> int | None:
    """Returns the dim of a dense tensor that counts the rows: `first`, or else the first one that does."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return None
    last = 2 if first else leaf.ndim
    return next((dim for dim in (first, *range(last)) if leaf.ndim > dim and leaf.shape[dim] == rows), None)


def rows_along(leaves: Sequence[Any], dims: Sequence[int | None]) -> int | None:
    """Returns how many rows the leaves have along their dims; None if that is not the same for all that have any."""
    counts = {int(leaf.shape[dim]) for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    return counts.pop() if len(counts) == 1 else None


def _rows_of(tensor: torch.Tensor, dim: int, chosen: Sequence[int]) -> torch.Tensor:
    """The chosen rows, as far as there are as many, with the strides that the first rows have."""
    rows = tensor.index_select(dim, torch.tensor(list(chosen), device=tensor.device))
    return torch.empty_like(tensor.narrow(dim, 0, len(chosen))).copy_(rows)


def carries_rows(leaf: Any, rows: int) -> bool:
    """Says whether the leaf is a tensor whose dim 0 counts the rows of a batch of `rows` rows; none that is sparse."""
    is_dense = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    return is_dense and leaf.ndim >= 1 and bool(leaf.shape[0] == rows)


@dataclass(frozen=True)
class BatchRows:
    """How workers share the rows of a batch; tensors that are shared alike have the same rows on each.

    Attributes:
        rows: Rows of each worker that speaks, None for the others, in rank order.
    """

    rows: tuple[int | None, ...]

    @property
    def total(self) -> int:
        """Rows of the batch."""
        return sum(rows for rows in self.rows if rows is not None)
