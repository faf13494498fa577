"""In which order the dims of a tensor lie in memory: `channels_last`, outputs of recurrent layers, transposed inputs.

Decides what such an order is. It is part of what a tensor is, beside its values: random numbers are handed out in the
order of memory, so that a dropout mask of a tensor in another order is another mask.

[Note: kernels of convolutions]
What a convolution returns is in `channels_last` if its input or its kernel is. FSDP2 keeps parameters in the usual
order only, so that here the input is brought into the format of the kernel, with the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Order = tuple[int, ...]
"""Dims from the outermost in memory to the innermost; empty for the usual order, that of `torch.contiguous_format`."""


def memory_order(tensor: Tensor) -> Order:
    """Returns the order of the dims of `tensor`, dense or not, on any device; empty if it has no strides.

    Example:
        >>> memory_order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last))
        (0, 2, 3, 1)
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ()
    strides, sizes = tensor.stride(), tensor.shape
    if any(stride == 0 and size > 1 for stride, size in zip(strides, sizes)):
        return ()  # what is repeated has no place of its own in memory
    order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], sizes[dim] == 1)))
    return () if order == tuple(range(tensor.ndim)) else order


def empty_in_order(
    shape: Sequence[int], order: Order, dtype: torch.dtype | None, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns a dense tensor of `shape`, without values, whose dims lie in `order`."""
    if not order:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    outside_in = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return outside_in.permute([order.index(dim) for dim in range(len(order))])


def in_order(tensor: Tensor, order: Order) -> Tensor:
    """Returns `tensor` with its dims in `order`: itself, if they are."""
    if memory_order(tensor) == order:
        return tensor
    return empty_in_order(tensor.shape, order, tensor.dtype, tensor.device).copy_(tensor)


def kernel_format(kernel: Tensor) -> torch.memory_format:
    """Returns the format of a convolution's kernel, told by its strides: `channels_last` or the usual one."""
    channels_last = _CHANNELS_LAST.get(kernel.ndim)
    if channels_last is None:
        return torch.contiguous_format
    like = torch.empty(kernel.shape, device="meta", memory_format=channels_last)
    return channels_last if kernel.stride() == like.stride() else torch.contiguous_format


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class KernelFormats:
    """Brings inputs of convolutions into the formats of their kernels. See [Note: kernels of convolutions].

    Args:
        module: Has the convolutions; a stage of a pipeline may have some of them only.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks: dict[str, RemovableHandle] = {}

    def set(self, formats: Mapping[str, torch.memory_format]) -> None:
        """Some kernels, by the names of the parameters, have other formats now."""
        modules = dict(self._module.named_modules())
        for name, memory_format in formats.items():
            path, _, leaf = name.rpartition(".")
            if name in self._hooks:
                self._hooks.pop(name).remove()
            submodule = modules.get(path)
            is_kernel = leaf == "weight" and isinstance(submodule, nn.modules.conv._ConvNd)
            if submodule is not None and is_kernel and memory_format is not torch.contiguous_format:
                self._hooks[name] = submodule.register_forward_pre_hook(_bringing_into(memory_format))


def _bringing_into(memory_format: torch.memory_format) -> Any:
    def bring(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        image, *others = args
        if _CHANNELS_LAST.get(image.ndim) is not memory_format:  # an image without a batch is in the usual order
            return args
        return torch.empty_like(image, memory_format=memory_format).copy_(image), *others

    return bring
