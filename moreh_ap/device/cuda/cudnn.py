"""Queries of cuDNN, which the workers' devices may have and the controller does not use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have modules in the controller leave to the workers what cuDNN wants of them."""
    group = patches.group("`nn.LSTM` lays its weights out for cuDNN, and warns without it; workers ask themselves.")

    def is_acceptable(tensor: Tensor) -> Any:
        """Whether cuDNN takes the tensor; False for tensors on the accelerator."""
        return not isinstance(tensor, VirtualTensor) and original(tensor)

    original = group.replace(torch.backends.cudnn, "is_acceptable", is_acceptable)
