"""Tensors that a script sends to its own processes: values are sent, parameters on the accelerator are refused."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have tensors on the accelerator go to other processes by value, and parameters refuse to go."""
    group = patches.group("A virtual tensor has no memory to share: its value is in a worker of this process.")

    def share_memory(tensor: Tensor) -> Tensor:
        """Leaves tensors on the accelerator as they are, as tensors on a GPU."""
        return tensor if isinstance(tensor, VirtualTensor) else original(tensor)

    original = group.replace(torch.Tensor, "share_memory_", share_memory)
    group.put(
        ForkingPickler._extra_reducers,  # type: ignore[attr-defined]  # `register` adds to it, nothing removes
        VirtualTensor,
        _reduce,
        "multiprocessing.reduction.ForkingPickler._extra_reducers",
        "Sends the values of virtual tensors to other processes; refuses parameters.",
    )


def _reduce(tensor: VirtualTensor) -> Any:
    if getattr(tensor, "_is_param", False):
        raise UnsupportedError(
            f"A parameter of shape {tuple(tensor.shape)} goes to another process, which would train a copy.",
            allowed="Models on the accelerator in the script's own process and its threads.",
            fix="model.cpu()  # before multiprocessing.Process(target=train, args=(model,))",
        )
    return tensor.__reduce_ex__(2)
