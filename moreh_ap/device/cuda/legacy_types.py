"""``torch.cuda.FloatTensor`` and its kin: types that make, name and recognize tensors on the accelerator.

Many older scripts write ``Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor`` and call it, pass it to
`Tensor.type`, or make it the default. Must not know where values are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from moreh_ap.device.host_tensors import to_accelerator
from moreh_ap.device.tensor import VirtualTensor, has_accelerator_tensor
from moreh_ap.patching import Patches

_DTYPES = {
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _AcceleratorType(type):
    """The class of these types. As with PyTorch's own, no class can be derived from them."""

    dtype: torch.dtype
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        """A tensor of that size, or with these values."""
        kwargs.pop("device", None)
        host = [arg.cpu() if isinstance(arg, VirtualTensor) else arg for arg in args]
        return to_accelerator(getattr(torch, cls.__name__)(*host, **kwargs))

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, VirtualTensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __repr__(cls) -> str:
        return f"<class 'torch.cuda.{cls.__name__}'>"


def install(patches: Patches) -> None:
    """Have the tensor types of `torch.cuda` make tensors on the accelerator, and be the default where asked."""
    group = patches.group("Older scripts make, name and recognize tensors by these types, which no function mode sees.")
    for name, dtype in _DTYPES.items():
        kind = _AcceleratorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})
        group.replace(torch.cuda, name, kind, f"Makes and recognizes {dtype} tensors on the accelerator.")
    # ``torch.Tensor([loss, other_loss])``: a class, which no mode sees.
    make = _with_host_values(torch.Tensor.__new__)
    group.replace(torch.Tensor, "__new__", staticmethod(make), "Takes lists with numbers on the accelerator in them.")

    def set_default_tensor_type(asked: Any) -> None:
        """Makes a type of `torch.cuda` the default: its dtype, on the accelerator."""
        dtype = dtype_of(asked)
        if dtype is None:
            original_set_default(asked)
        else:
            torch.set_default_dtype(dtype)
        torch.set_default_device(None if dtype is None else "cuda")

    original_set_default = group.replace(torch, "set_default_tensor_type", set_default_tensor_type)


def dtype_of(asked: Any) -> torch.dtype | None:
    """Returns the dtype of a type of the accelerator, or of its name; None for anything else."""
    if isinstance(asked, str) and asked.startswith("torch.cuda."):
        return _DTYPES.get(asked.removeprefix("torch.cuda."))
    return asked.dtype if isinstance(asked, _AcceleratorType) else None


def _with_host_values(new: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns `torch.Tensor.__new__` that takes lists with numbers on the accelerator in them, as those on a GPU."""

    def make(*args: Any, **kwargs: Any) -> Tensor:  # dynamo compares signatures, and takes this one for any
        try:
            return new(*args, **kwargs)
        except RuntimeError:
            if not (len(args) > 1 and isinstance(args[1], (list, tuple)) and has_accelerator_tensor(args)):
                raise
        return new(*tree_map_only(VirtualTensor, lambda tensor: tensor.to_host(), args), **kwargs)

    return make
