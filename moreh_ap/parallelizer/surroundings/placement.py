"""Lets a forward that names "cuda" run on the device this worker has.

Decides where tensors that a forward makes or moves end up. Must not know losses, batches or plans.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CUDA_DEVICES = frozenset(
    device for name in ("cuda", *(f"cuda:{index}" for index in range(128))) for device in (name, torch.device(name))
)
"""Devices in calls of torch functions that mean this worker's device."""


@dataclass(eq=False, repr=False)
class OwnDevice(TorchFunctionMode):
    """While active, every CUDA device named in a call of a torch function means `device`.

    Attributes:
        device: This worker's device.
    """

    device: torch.device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to or func is torch.Tensor.cuda or kwargs.get("device") in CUDA_DEVICES:
            func, args, kwargs = self.place(func, args, kwargs)
        return func(*args, **kwargs)

    def place(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns the call with this worker's device in place of any CUDA device."""
        if func is torch.Tensor.cuda:
            flags = {key: value for key, value in kwargs.items() if key != "device"}
            return torch.Tensor.to, (args[0], self.device), flags
        if func is torch.Tensor.to:
            args = tuple(self.device if arg in CUDA_DEVICES else arg for arg in args)
        if kwargs.get("device") in CUDA_DEVICES:
            kwargs = {**kwargs, "device": self.device}
        return func, args, kwargs


def on_own_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, code of a model that names "cuda" gets this worker's `device`: a worker with a GPU sees no other."""
    return OwnDevice(device) if device.type == "cpu" else nullcontext()
