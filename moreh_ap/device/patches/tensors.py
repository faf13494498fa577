"""Functions on tensors that no function mode sees: constructors, streams, questions for cuDNN, default types."""

from __future__ import annotations

from typing import Any

import torch

from moreh_ap.device import legacy_types, transfers
from moreh_ap.device.patches.cuda_generator import Generator
from moreh_ap.device.patches.registry import Patches
from moreh_ap.device.tensor import VirtualTensor


def install(patches: Patches) -> None:
    """Have these functions take tensors on the accelerator, or make them."""
    # A stream of the accelerator does what it is told in order: no memory is used again before its time.
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    # ``torch.Tensor([loss, other_loss])``: a class, which no mode sees.
    patches.replace(torch.Tensor, "__new__", staticmethod(legacy_types.with_host_values(torch.Tensor.__new__)))
    patches.replace(torch, "Generator", Generator)

    acceptable = torch.backends.cudnn.is_acceptable
    # `nn.LSTM` asks whether to lay its weights out for cuDNN, and warns if there is none; workers ask for themselves.
    patches.replace(
        torch.backends.cudnn,
        "is_acceptable",
        lambda tensor: not isinstance(tensor, VirtualTensor) and acceptable(tensor),
    )

    def set_default_tensor_type(asked: Any) -> None:
        dtype = legacy_types.dtype_of(asked)
        if dtype is None:
            original_set_default(asked)
        else:
            torch.set_default_dtype(dtype)
        torch.set_default_device(None if dtype is None else "cuda")

    original_set_default = patches.replace(torch, "set_default_tensor_type", set_default_tensor_type)
    for name in ("_exchange_device", "_maybe_exchange_device"):  # ``with torch.cuda.device(0)``
        patches.replace(torch.cuda, name, _exchange_device)


def _exchange_device(index: int) -> int:
    """The device that was current before, as PyTorch's function tells it: the one there is, or -1 for no change."""
    if index < 0:
        return -1
    transfers.require_accelerator(index)
    return 0
