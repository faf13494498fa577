"""A trial in float64, where that in float32 shows nothing: a deep network with batch normalisation makes much of
rounding, of a few rows more than of a batch.

Decides which models can be tried so, and how. Must not know what is tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.data.fsdp import fsdp_roots
from moreh_ap.parallelizer.precision.output_precision import PROMISES
from moreh_ap.parallelizer.row_dims.placed_probe import PlacedJoinedProbe


class Float64Probe(PlacedJoinedProbe):
    """As its base, for a model in float64, in which rounding explains next to nothing."""

    _least_rounding = 1e-4


def may_run_in_float64(call: Call) -> bool:
    """Says whether a model computes in float32, and this worker has all of its parameters."""
    module = call.module
    if call.autocast is not None or fsdp_roots(module) or PROMISES in module.__dict__:
        return False
    tensors = [one for one in _tensors(module) if one.is_floating_point()]
    return all(one.dtype == torch.float32 and not one.is_meta and not isinstance(one, DTensor) for one in tensors)


@contextmanager
def in_float64(module: nn.Module) -> Iterator[None]:
    """Inside, parameters and buffers are in float64 and have no gradients."""
    kept = [(tensor, tensor.data) for tensor in _tensors(module) if tensor.dtype == torch.float32]
    for tensor, data in kept:
        tensor.grad = None
        tensor.data = data.double()
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.grad = None
            tensor.data = data


def to_float64(arguments: Any) -> Any:
    """Returns arguments with tensors of float32 in float64."""
    return tree_map(
        lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf, arguments
    )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())
