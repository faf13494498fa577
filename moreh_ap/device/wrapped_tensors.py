"""Tensors with virtual tensors inside, on the accelerator.

Transforms of `torch.func` make such tensors of the arguments of the script's function, and libraries have classes of
them (quantized values, their scales). Such a class makes itself with `Tensor._make_wrapper_subclass` and the device of
what is inside; as with `VirtualTensor`, that device is Python's only: builds of PyTorch without CUDA have no guard.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor

from moreh_ap.device.tensor import ACCELERATOR, ORDINARY
from moreh_ap.device.transfers import is_accelerator
from moreh_ap.patching import Patches

_MARK = "_moreh_on_accelerator"


def install(patches: Patches) -> None:
    """Have tensors of other classes be made on the accelerator."""
    group = patches.group("A tensor with virtual tensors inside is on the accelerator as they are.")

    def make_wrapper(cls: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes a tensor around others; on the accelerator, if they are there."""
        device = kwargs.get("device")
        if device is None or not is_accelerator(device):
            return original(cls, size, *args, **kwargs)
        made = original(cls, size, *args, **{**kwargs, "device": torch.device("cpu")})
        setattr(made, _MARK, True)
        return made

    original = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    group.replace(torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper), "Makes a tensor around others.")


def device_of(func: Callable[[Tensor], Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Handles ``tensor.device``."""
    return func(*args, **kwargs) if not _is_marked(args[0]) else ACCELERATOR


def is_cuda(func: Callable[[Tensor], Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Handles ``tensor.is_cuda``."""
    return func(*args, **kwargs) if not _is_marked(args[0]) else True


def untracked(tensor: Tensor) -> Tensor:
    """Returns a tensor that was made inside of transforms of `torch.func`, as they find any constant."""
    while is_gradtrackingtensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _is_marked(tensor: Tensor) -> bool:
    if type(tensor) not in ORDINARY:
        return bool(getattr(tensor, _MARK, False))
    return is_functorch_wrapped_tensor(tensor) and _inmost(tensor).is_cuda


def _inmost(tensor: Tensor) -> Tensor:
    """Returns the script's tensor in one that transforms of `torch.func` have made of it."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor
