"""Lets a forward that names "cuda" run on the device this worker has.

Decides where tensors that a forward makes or moves end up. Must not know losses, batches or plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MOVES = {torch.Tensor.to, torch.Tensor.cuda}


class OwnDevice(TorchFunctionMode):
    """While active, every CUDA device named in a call of a torch function means `device`.

    Args:
        device: This worker's device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MOVES or "device" in kwargs:
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
            args = tuple(self.device if _is_cuda(arg) else arg for arg in args)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self.device}
        return func, args, kwargs


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
