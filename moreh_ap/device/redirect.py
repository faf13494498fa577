"""Sends what a script asks of "cuda" to the accelerator: moves between devices, factory functions, device contexts.

`redirect` is the one function behind both doors: the `TorchFunctionMode` that sees every call of a thread, and
`VirtualTensor.__torch_function__`, which sees calls on virtual tensors wherever they happen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _device as torch_device_context
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import ACCELERATOR, Cell, VirtualTensor, place, to_accelerator, to_host
from moreh_ap.device.values import InFile

_MAY_SHARE_MEMORY = {torch.as_tensor, torch.asarray, torch.frombuffer}
_FACTORIES = torch_device_context._device_constructors()


class _Active:
    """Whether the accelerator is enabled; a mode left on some thread's stack lets everything pass when it is not."""

    on = False


ACTIVE = _Active()


class RedirectMode(TorchFunctionMode):
    """While it is active, "cuda" means the accelerator in every call of PyTorch by this thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return redirect(func, args, kwargs or {}) if ACTIVE.on else func(*args, **(kwargs or {}))


def remove_mode(mode: RedirectMode) -> None:
    """Take `mode` off this thread's stack, wherever it stands there."""
    above = []
    while _len_torch_function_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def redirect(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `func`, giving "cuda" the meaning of the accelerator."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    device = kwargs.get("device")
    if device is None and func in _FACTORIES:
        device = torch_device_context.CURRENT_DEVICE
    if device is not None and is_accelerator(device):
        return _make_on_accelerator(func, args, kwargs)
    return func(*args, **kwargs)


def is_accelerator(device: Any) -> bool:
    """True if `device`, as scripts write it (string, index or `torch.device`), means the accelerator.

    Raises:
        RuntimeError: For a device index other than 0, as PyTorch does on a machine with one device.
    """
    if type(device) is int:
        kind, index = "cuda", device
    else:
        try:
            parsed = torch.device(device)
        except (RuntimeError, TypeError):
            return False  # not a device at all: PyTorch says so in its own words
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


def _make_on_accelerator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    requires_grad = bool(kwargs.pop("requires_grad", False))
    kwargs.pop("pin_memory", None)
    kwargs["device"] = "cpu"
    plain = tree_map_only(VirtualTensor, lambda tensor: tensor.to_host(), (args, kwargs))
    made = func(*plain[0], **plain[1])
    if not isinstance(made, Tensor):
        return made
    source = next((arg for arg in args if isinstance(arg, Tensor)), None)
    shares_memory = made is source or made._is_view() or func in _MAY_SHARE_MEMORY
    tensor = to_accelerator(made) if shares_memory else place(made.detach())
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _parse_to(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
    """The target device (None: stay), the other arguments of `Tensor.to`, and whether a copy is demanded."""
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


def _to(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    device, rest, copy = _parse_to(args[1:], kwargs)
    rest = {name: value for name, value in rest.items() if value is not None}
    moved = tensor if device is None else move(tensor, device)
    if not rest:
        return moved.clone() if copy and moved is tensor else moved
    if isinstance(moved, VirtualTensor) and isinstance(moved._cell.value, InFile) and set(rest) == {"dtype"}:
        return _cast_unread(moved, rest["dtype"])
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(moved, copy=copy and moved is tensor, **rest)


def _cast_unread(tensor: VirtualTensor, dtype: torch.dtype) -> VirtualTensor:
    """Change the dtype of a tensor that still lies in its file: whoever reads it will cast."""
    value = tensor._cell.value
    if dtype == tensor.dtype or not isinstance(value, InFile):
        return tensor
    meta = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return VirtualTensor(Cell(value.cast(dtype), tensor._cell.device), meta)


def move(tensor: Tensor, device: Any) -> Tensor:
    """`tensor` on `device`; the same object if it is there already."""
    if is_accelerator(device):
        if not isinstance(tensor, VirtualTensor):
            return tensor if tensor.device.type == "meta" else to_accelerator(tensor)
        if tensor.is_cuda:
            return tensor
        return VirtualTensor(Cell(tensor._cell.value, ACCELERATOR), tensor, tensor.requires_grad)
    if isinstance(tensor, VirtualTensor) and torch.device(device).type == "cpu":
        return to_host(tensor) if tensor.is_cuda else tensor
    with torch._C.DisableTorchFunctionSubclass():
        return torch.Tensor.to(tensor, device)


def _cuda(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return move(args[0], "cuda" if device is None else device)


def _cpu(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return move(args[0], "cpu") if isinstance(args[0], VirtualTensor) else func(*args, **kwargs)


def _pin_memory(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0]  # batches travel to workers as bytes: page-locked memory would gain nothing


def _type(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    asked = args[1] if len(args) > 1 else kwargs.get("dtype")
    if asked is None:
        with torch._C.DisableTorchFunctionSubclass():
            name = torch.Tensor.type(tensor)
        on_accelerator = isinstance(tensor, VirtualTensor) and tensor.is_cuda
        return name.replace("torch.", "torch.cuda.", 1) if on_accelerator else name
    if isinstance(asked, str) and asked.startswith("torch.cuda."):
        return _to(func, (move(tensor, "cuda"), torch.tensor([]).type(asked.replace("cuda.", "")).dtype), {})
    return func(*args, **kwargs)


def _backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    from moreh_ap.session.call import retaining_graph

    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args[1:])), **kwargs}
    if given.get("create_graph") and isinstance(args[0], VirtualTensor):
        from moreh_ap.errors import UnsupportedError

        raise UnsupportedError(
            "backward(create_graph=True): gradients of gradients are not computed on the accelerator in this version.",
            allowed="backward() and backward(retain_graph=True).",
            fix='model.to("cpu")  # a gradient penalty works on the CPU',
        )
    with retaining_graph(bool(given.get("retain_graph"))):
        return func(*args, **kwargs)


def _device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    by_number = len(args) == 1 and type(args[0]) is int and not kwargs
    return torch.device("cuda", args[0]) if by_number else func(*args, **kwargs)


_HANDLERS: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.pin_memory: _pin_memory,
    torch.Tensor.type: _type,
    torch.Tensor.backward: _backward,
    torch.device: _device,
}
