"""Tensors of checkpoint files for other libraries' loaders: lazily read, recognised, and read."""

from __future__ import annotations

import torch
from torch import Tensor

from moreh_ap.device.tensor import CPU, VirtualTensor
from moreh_ap.device.values import Cell, InFile
from moreh_ap.protocol.tensor_source import TensorSource


def promise_from_file(source: TensorSource, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of this shape and dtype whose value stays in its file until it is read."""
    return VirtualTensor(Cell(InFile((source,), shape, dtype), CPU), torch.empty(shape, dtype=dtype, device="meta"))


def is_virtual(tensor: Tensor) -> bool:
    """Returns whether the tensor is a virtual tensor."""
    return isinstance(tensor, VirtualTensor)


def to_host(tensor: Tensor) -> Tensor:
    """Returns the value of a virtual tensor as an ordinary CPU tensor; waits if it must."""
    assert isinstance(tensor, VirtualTensor)
    return tensor.to_host()
