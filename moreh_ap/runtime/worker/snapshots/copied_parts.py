"""What is written down of a copy so that workers under another plan can take it over, too.

Decides which part of a whole tensor each tensor of a copy is. Must not know how the parts are put together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from moreh_ap.parallelizer.state.loading import Piece, local_shard, pieces
from moreh_ap.runtime.worker.commands.tables import Tables
from moreh_ap.runtime.worker.snapshots.state_pickling import Name


class Part(NamedTuple):
    """What a worker has of a tensor.

    Attributes:
        shape: Shape of the whole tensor.
        pieces: Which slices of it are which of the worker's.
        dtype, offset, size, strides: How the worker's lies in its memory.
    """

    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    strides: tuple[int, ...]


class Description(NamedTuple):
    """What a copy says of itself.

    Attributes:
        place_of: Which memory has the values of each tensor that another worker with the same models has, too.
        devices: Where each memory was.
        elsewhere: For memory that is in the copy of another worker of this host its rank, and the tensor's name.
        beside: The same for memory that a worker of the next host has in its copy, too.
        pickled: All else, see `StatePickler`.
        parts: Of parameters and temporaries.
    """

    place_of: Mapping[Name, int]
    devices: Sequence[str]
    elsewhere: Mapping[int, tuple[int, Name]]
    beside: Mapping[int, tuple[int, Name]]
    pickled: bytes
    parts: Mapping[Name, Part]


def parts_of(tables: Tables) -> dict[Name, Part]:
    """Returns what this worker has of each parameter, and of each tensor that a script has computed from some."""
    found: dict[Name, Part] = {}
    for owner, model in tables.models.items():
        for name, (shape, of_whole) in model.pieces.items():
            found["parameter", owner, name] = _part(shape, of_whole, local_shard(model.parameters[name].detach()))
    for ref, held in tables.temporaries.items():
        if held is not None:
            found["temporary", ref.owner, ref.kind, ref.name] = _part(
                held.shape, pieces(held.tensor, held.layout), held.local
            )
    return found


def _part(shape: tuple[int, ...], of_whole: Sequence[Piece], local: torch.Tensor) -> Part:
    return Part(shape, of_whole, local.dtype, int(local.storage_offset()), tuple(local.shape), local.stride())
