"""A worker's share of a training checkpoint: which elements of each tensor it writes.

Decides that every element is written once. Must not know what the tensors are, how files are written
(`checkpoint_files`), or where they stand in a folder; reading is `loading`'s.

A tensor is cut into boxes, one for each piece that a worker holds. Workers that have copies of a large piece divide its
rows among them, so that each has a part of the work, and of a small one the first copy counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.state.checkpoint_files import Box
from moreh_ap.parallelizer.state.loading import Piece, pieces
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.parallelizer.state.tensor_layout import shard_range

_DIVIDED_BYTES = 2**20
"""From which size on workers with copies of a piece divide its rows: a box costs 100 bytes of a file's header."""


def boxes_of(tensors: Mapping[str, StateShard | None]) -> list[Box]:
    """Returns the boxes that this worker writes of tensors by their names in the checkpoint."""
    boxes = []
    for name, held in tensors.items():
        if held is None or held.copies is None:
            continue
        local = held.local.detach()
        for piece in pieces(held.tensor, held.layout):
            for box, own in _to_write(piece, local.element_size(), held.copies):
                start, size = (
                    tuple(dim_slice.start for dim_slice in box),
                    tuple(dim_slice.stop - dim_slice.start for dim_slice in box),
                )
                boxes.append(Box(name, start, size, local.dtype, lambda local=local, own=own: local[own]))  # type: ignore[misc]
    return boxes


def _to_write(piece: Piece, element_size: int, copies: Axis) -> list[Piece]:
    """Returns which part of a piece this worker writes, if any, where other workers have copies of it."""
    box, own = piece
    if prod(s.stop - s.start for s in own) * element_size < _DIVIDED_BYTES:
        return [piece] if copies.rank == 0 else []
    first, last = shard_range(own[0].stop - own[0].start, copies.size, copies.rank)
    if first == last:
        return []

    def part(slices: tuple[slice, ...]) -> tuple[slice, ...]:
        return (slice(slices[0].start + first, slices[0].start + last), *slices[1:])

    return [(part(box), part(own))]
