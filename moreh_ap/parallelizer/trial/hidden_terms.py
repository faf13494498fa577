"""Parameters and buffers that are zero, filled for a trial, which else does not show what is added to them.

Decides what is filled. Must not know what is tried.

[Note: hidden terms]
A forward that returns ``loss.sum() + self.penalty`` gives summands for slices of the rows as long as the penalty is
zero, and ``x + self.gate * (x - x.mean(0))`` gives rows as long as the gate is. Training makes them something else.
Gradients of a trial show the gate, but neither a buffer nor the square of a parameter, and evaluation has none. So
calls whose results add up, or that have no gradients, are compared a second time with other values in place of zeros.
So are all that are given zeros, such as a coefficient that has yet to grow, and all whose own modules hold zeros.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.protocol.batch import are_numbers, carries_rows
from moreh_ap.protocol.module_attributes import has_memory

_FILLING = 0.1
"""Large beside what counts as rounding of a loss, and small enough for what is divided, or raised to a power, by it."""


def zeros_of(module: nn.Module) -> list[Tensor]:
    """Returns what this worker has of those parameters and buffers of a model that are zero everywhere."""
    return _zeros_among(module, True)


def own_zeros_of(module: nn.Module) -> list[Tensor]:
    """Returns the same of modules that are not PyTorch's, whose biases do nothing else when they are no longer zero."""
    return [zero for submodule in module.modules() if _is_own(submodule) for zero in _zeros_among(submodule, False)]


def with_filled(leaves: list[Any], rows: int) -> list[Any]:
    """Returns the leaves of arguments with others in place of tensors of zeros, and of zeros among a few numbers of no
    row; the same list if there are none."""
    others = {id(leaf): _without_zeros(leaf) for leaf in leaves if isinstance(leaf, Tensor) and _hides(leaf, rows)}
    return [others.get(id(leaf), leaf) for leaf in leaves] if others else leaves


def _hides(leaf: Tensor, rows: int) -> bool:
    are_coefficients = are_numbers(leaf) and leaf.is_floating_point() and not carries_rows(leaf, rows)
    return _is_filled_with_zeros(leaf) or (are_coefficients and not bool(leaf.all()))


def _without_zeros(leaf: Tensor) -> Tensor:
    return leaf.detach().masked_fill(leaf == 0, _FILLING)


@contextmanager
def filled(zeros: list[Tensor]) -> Iterator[None]:
    """Inside, the tensors are not zero."""
    with torch.no_grad():
        for tensor in zeros:
            tensor.data.fill_(_FILLING)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor in zeros:
                tensor.data.zero_()


def _zeros_among(module: nn.Module, recurse: bool) -> list[Tensor]:
    tensors = itertools.chain(module.parameters(recurse), module.buffers(recurse))
    with torch.no_grad():
        return [shard.detach() for shard in map(local_shard, tensors) if _is_filled_with_zeros(shard)]


def _is_own(module: nn.Module) -> bool:
    kinds = (kind.__module__ for kind in type(module).__mro__)
    return not next(name for name in kinds if not name.startswith("torch.distributed.")).startswith("torch.")


def _is_filled_with_zeros(shard: Tensor) -> bool:
    is_number = shard.is_floating_point() and not shard.is_meta and shard.layout is torch.strided
    return is_number and shard.numel() > 0 and has_memory(shard) and not bool(shard.any())
