"""`torch.cuda.FloatTensor` and its kin in PyTorch's namespaces; `legacy_types` decides what they do."""

from __future__ import annotations

from typing import Any

import torch

from moreh_ap.device.cuda import legacy_types
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have the tensor types of `torch.cuda` make tensors on the accelerator, and be the default where asked."""
    group = patches.group("Older scripts make, name and recognize tensors by these types, which no function mode sees.")
    for name, kind in legacy_types.replacements().items():
        group.replace(torch.cuda, name, kind, f"Makes and recognizes {kind.dtype} tensors on the accelerator.")
    # ``torch.Tensor([loss, other_loss])``: a class, which no mode sees.
    make = legacy_types.with_host_values(torch.Tensor.__new__)
    group.replace(torch.Tensor, "__new__", staticmethod(make), "Takes lists with numbers on the accelerator in them.")

    def set_default_tensor_type(asked: Any) -> None:
        """Makes a type of `torch.cuda` the default: its dtype, on the accelerator."""
        dtype = legacy_types.dtype_of(asked)
        if dtype is None:
            original_set_default(asked)
        else:
            torch.set_default_dtype(dtype)
        torch.set_default_device(None if dtype is None else "cuda")

    original_set_default = group.replace(torch, "set_default_tensor_type", set_default_tensor_type)
