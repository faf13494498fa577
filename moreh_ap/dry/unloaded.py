"""Tensors that have a shape and no numbers: the weights of a dry run, on the CPU and on the accelerator.

Decides what operations on such a tensor give. Must not know modules, nor who makes such tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device.operations import meta_of, written_arguments
from moreh_ap.device.tensor import ACCELERATOR, CPU, VirtualTensor
from moreh_ap.device.values import Cell, Value
from moreh_ap.errors import UnsupportedError

FIX = "moreh-ap plan --with-weights --devices 8xH100 train.py"


def no_numbers() -> UnsupportedError:
    """Returns the error for a script that reads a number which a dry run does not have."""
    return UnsupportedError(
        "the script reads the value of a weight, or of what was computed from one, before its first call of the model",
        "shapes, dtypes and data without weights; or the weights in this process's memory, by --with-weights",
        FIX,
        "docs/dry-run.md#errors",
    )


class Unloaded(Value):
    """A value of which only the shape is known."""

    __slots__ = ()

    stays = True

    def runner(self) -> Any:
        return _run

    def ready(self) -> bool:
        return True

    def read(self) -> Tensor:
        raise no_numbers()

    def write(self, tensor: Tensor) -> None:
        """Drops the change: there are no numbers to change."""


def unloaded(like: Tensor, device: torch.device = CPU) -> VirtualTensor:
    """Returns a tensor with the shape, strides and dtype of another, and no numbers."""
    return VirtualTensor(Cell(Unloaded(), device), like.detach())


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what an operation gives, as far as shapes tell.

    Raises:
        UnsupportedError: The operation needs numbers.
    """
    named = {**meta_of(kwargs), **({"device": "meta"} if kwargs.get("device") is not None else {})}
    try:
        result = func(*meta_of(args), **named)
    except NotImplementedError as error:
        raise no_numbers() from error
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise no_numbers() from error
    written = written_arguments(func, args, kwargs)
    for tensor in written:
        tensor._cell.value = Unloaded()
    if written:
        return tree_map_only(Tensor, lambda _: written[0], result)
    is_there = any(isinstance(leaf, VirtualTensor) and leaf.is_cuda for leaf in tree_leaves((args, kwargs)))
    return tree_map_only(Tensor, lambda meta: unloaded(meta, ACCELERATOR if is_there else CPU), result)


def without_memory(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Returns a parameter of the same shape, dtype and attributes, without numbers."""
    shape = torch.empty_like(parameter, device="meta")
    made = torch.nn.Parameter(unloaded(shape), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
