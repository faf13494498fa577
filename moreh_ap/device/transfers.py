"""Moves between the CPU and the accelerator: the target device, and the results of `to`, `cuda`, `cpu` and the like.

Decides nothing about values: a move copies nothing to a worker.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.cuda import legacy_types
from moreh_ap.device.host_tensors import HostTensor, mark, put, to_accelerator, to_host
from moreh_ap.device.patches import parameter_hooks
from moreh_ap.device.tensor import ACCELERATOR, OWN_ATTRIBUTES, Cell, VirtualTensor, nested_refused
from moreh_ap.device.values import InFile


def is_accelerator(device: Any) -> bool:
    """Returns whether `device` (a string, index or `torch.device`) means the accelerator.

    Raises:
        RuntimeError: For a device index other than 0, as PyTorch does on a machine with one device.
    """
    if type(device) is int:
        kind, index = "cuda", device
    else:
        try:
            parsed = torch.device(device)
        except (RuntimeError, TypeError):
            return False  # not a device: PyTorch raises its own error
        kind, index = parsed.type, parsed.index
    if kind != "cuda":
        return False
    if index not in (None, 0):
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: cuda:{index} was asked for, but the accelerator is one device.\n"
            "Every physical device stands behind it.\n"
            'Write "cuda" or "cuda:0".'
        )
    return True


def require_accelerator(device: Any) -> None:
    """Accepts None and devices that mean the accelerator.

    Raises:
        ValueError: The device is another one; functions of `torch.cuda` raise the same.
    """
    if device is not None and not is_accelerator(device):
        raise ValueError(f"Expected a cuda device, but got: {torch.device(device)}")


def _parse_to(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """Returns the target device (None: unchanged), the other arguments of `Tensor.to`, and whether to force a copy."""
    rest = {name: value for name, value in kwargs.items() if name in ("dtype", "memory_format")}
    device = kwargs.get("device")
    if kwargs.get("other") is not None:
        args = (kwargs["other"], *args)
    positional = list(args)
    copy = bool(kwargs.get("copy", False))
    if positional and isinstance(positional[0], Tensor):
        other = positional.pop(0)
        device, rest["dtype"] = other.device, other.dtype
    elif positional and not isinstance(positional[0], torch.dtype):
        device = positional.pop(0)
    if positional and isinstance(positional[0], torch.dtype):
        rest["dtype"] = positional.pop(0)
    if len(positional) > 1:  # (non_blocking, copy)
        copy = bool(positional[1])
    return device, rest, copy


def to_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    device, rest, copy = _parse_to(args[1:], kwargs)
    rest = {name: value for name, value in rest.items() if value is not None}
    if rest and type(tensor) is Tensor and _is_ordinary(tensor) and is_accelerator(device):
        with torch._C.DisableTorchFunctionSubclass():
            return put(torch.Tensor.to(tensor.detach(), copy=True, **rest))  # a move and a cast would be two copies
    moved = tensor if device is None else move(tensor, device)
    if not rest:
        return moved.clone() if copy and moved is tensor else moved
    if isinstance(moved, VirtualTensor) and isinstance(moved._cell.value, InFile) and set(rest) == {"dtype"}:
        return _cast_unread(moved, rest["dtype"])
    with torch._C.DisableTorchFunctionSubclass():
        cast = torch.Tensor.to(moved, copy=copy and moved is tensor, **rest)
        return mark(cast) if type(moved) is HostTensor else cast


def _is_ordinary(tensor: Tensor) -> bool:
    """Returns whether a tensor is one of host memory, without a graph, that no transform of functions has wrapped."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor.device.type == "cpu" and not tensor.requires_grad and not is_wrapped


def _cast_unread(tensor: VirtualTensor, dtype: torch.dtype) -> VirtualTensor:
    """Changes the dtype of a tensor that is still in its file: the cast happens when it is read."""
    value = tensor._cell.value
    if dtype == tensor.dtype or not isinstance(value, InFile):
        return tensor
    meta = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return VirtualTensor(Cell(value.cast(dtype), tensor._cell.device), meta)


def move(tensor: Tensor, device: Any) -> Tensor:
    """Returns `tensor` on `device`; the same object if it is already there."""
    if not isinstance(tensor, VirtualTensor) and hasattr(tensor, "__tensor_flatten__"):
        if tensor.is_nested and is_accelerator(device):
            raise nested_refused()
        return _move_parts(tensor, device)
    if is_accelerator(device):
        if not isinstance(tensor, VirtualTensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                return tensor  # of a transform, which this process computes
            return tensor if tensor.device.type == "meta" else to_accelerator(tensor)
        if tensor.is_cuda:
            return tensor
        return VirtualTensor(Cell(tensor._cell.value, ACCELERATOR), tensor, tensor.requires_grad)
    if isinstance(tensor, VirtualTensor) and torch.device(device).type == "cpu":
        return to_host(tensor) if tensor.is_cuda else tensor
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(tensor, device)


def _move_parts(tensor: Any, device: Any) -> Tensor:
    """Moves the tensors inside a tensor of a library's own class (quantized values and their scales)."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    moved = {name: move(part, device) for name, part in parts.items()}
    if all(moved[name] is part for name, part in parts.items()):
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        size, strides = tensor.size(), tensor.stride()
    made: Tensor = type(tensor).__tensor_unflatten__(moved, context, size, strides)
    return made


def type_as(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    other = args[1] if len(args) > 1 else kwargs["other"]
    return to_tensor(func, (args[0], other), {})


def cuda_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return move(args[0], "cuda" if device is None else device)


def cpu_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return move(args[0], "cpu") if isinstance(args[0], VirtualTensor) else func(*args, **kwargs)


def pin_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0]  # batches are sent to workers as bytes: page-locked memory would not help


def type_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    asked = args[1] if len(args) > 1 else kwargs.get("dtype")
    if asked is None:
        with torch._C.DisableTorchFunctionSubclass():
            name = torch.Tensor.type(tensor)
        on_accelerator = isinstance(tensor, VirtualTensor) and tensor.is_cuda
        return name.replace("torch.", "torch.cuda.", 1) if on_accelerator else name
    dtype = legacy_types.dtype_of(asked)
    if dtype is not None:
        return to_tensor(func, (move(tensor, "cuda"), dtype), {})
    if isinstance(asked, torch.dtype):
        return to_tensor(func, (tensor, asked), {})
    if isinstance(tensor, VirtualTensor):
        return func(move(tensor, "cpu"), *args[1:], **kwargs)  # ``x.type(torch.FloatTensor)`` leaves the accelerator
    return func(*args, **kwargs)


def swap(first: Tensor, second: Tensor) -> None:
    """Exchanges the content of two tensor objects, as `torch.utils.swap_tensors`; the first may have other references.

    A parameter may have been used before it moves: `torch.nn.utils.weight_norm` computes a weight at once, and a script
    may try its model on the CPU. An earlier graph keeps the earlier memory; a backward through it is refused. What the
    script has set on the first (`parameter._no_weight_decay = True`) stays there.
    """
    if first is second:
        return
    if first.is_leaf and first.requires_grad:
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(first).node.register_prehook(_refuse_backward)
    hooks = parameter_hooks.take(first, is_virtual=isinstance(first, VirtualTensor))
    first.__class__, second.__class__ = second.__class__, first.__class__
    of_script = {name: value for name, value in vars(first).items() if name not in OWN_ATTRIBUTES}
    first.__dict__, second.__dict__ = of_script | vars(second), vars(first)
    torch._C._swap_tensor_impl(first, second)  # type: ignore[attr-defined]
    parameter_hooks.give_back(first, hooks, is_virtual=isinstance(first, VirtualTensor))


def _refuse_backward(gradients: Any) -> None:
    raise RuntimeError(
        "backward() reached a parameter that has moved to another device since the forward.\n"
        "Move the model first, then call it."
    )
