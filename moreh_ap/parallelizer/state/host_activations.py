"""Activations in host memory between a forward and its backward, for runs of more rows than a device trains with.

Decides what of a graph is moved. Must not know what is run, nor what follows from it.

[Note: memory of a trial]
The split check runs two or three rows on every worker, also where a device trains with one row at a time: its
activations would be several times those that the plan was chosen for. So they wait for the backward in host memory,
which changes no number. Parameters stay: they are on the device all the same, and FSDP2 gathers them anew. Copies take
a second for some ten gigabytes, once for each kind of call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

_LEAST_BYTES = 1 << 20
"""Smaller tensors stay: all of them together are little, and each copy takes as long as some hundred kilobytes."""

_Packed = Tensor | tuple[torch.device, Tensor]


def saved_on_host(device_type: str = "cuda", least_bytes: int = _LEAST_BYTES) -> AbstractContextManager[Any]:
    """Inside, what a forward saves for its backward goes to host memory. See [Note: memory of a trial].

    Args:
        device_type: Where tensors have to be to be moved.
        least_bytes: Of a tensor that is moved.
    """

    def pack(tensor: Tensor) -> _Packed:
        small = tensor.numel() * tensor.element_size() < least_bytes
        if small or type(tensor) is not Tensor or tensor.device.type != device_type or _is_of_parameter(tensor):
            return tensor
        return tensor.device, tensor.detach().to("cpu", copy=True)

    def unpack(packed: _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, tensor = packed
        return tensor.to(device)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _is_of_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter or a view of one (the weight that a linear layer transposes)."""
    owner = tensor if tensor._base is None else tensor._base
    return isinstance(owner, nn.Parameter) or (owner.is_leaf and owner.requires_grad)
