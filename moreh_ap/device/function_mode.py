"""Redirects "cuda" in a script to the accelerator: moves between devices, factory functions, device contexts.

`redirect` is called from two places: the `TorchFunctionMode`, which sees every call of a thread, and
`VirtualTensor.__torch_function__`, which sees calls on virtual tensors in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils import _device as torch_device_context
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device import autocast, host_functions, transfers, wrapped_tensors
from moreh_ap.device.host_tensors import HostTensor, has_host_tensor, mark, on_accelerator, put, without_class
from moreh_ap.device.operations import ASKED
from moreh_ap.device.patches.parameter_hooks import KNOWN, after_backward, changed
from moreh_ap.device.tensor import ORDINARY, VirtualTensor, has_accelerator_tensor, place
from moreh_ap.device.tensor_classes import call_classed, is_classed
from moreh_ap.device.transfers import is_accelerator, move
from moreh_ap.device.worker_backend import IN_FORCE

_MAY_SHARE_MEMORY = {torch.as_tensor, torch.asarray, torch.frombuffer}
_FACTORIES = torch_device_context._device_constructors()
_VIRTUAL = frozenset({VirtualTensor})


class RedirectMode(TorchFunctionMode):
    """While this mode is active, "cuda" means the accelerator in every PyTorch call of the thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if HostTensor in types:
            return redirect_host(func, types, args, kwargs or {})
        if IN_FORCE.backend is None:  # left on another thread's stack, the mode lets every call pass
            return func(*args, **(kwargs or {}))
        if types and _VIRTUAL.issuperset(types):
            return VirtualTensor.__torch_function__(func, types, args, kwargs)  # as it would be once the mode is off
        if types and not ORDINARY.issuperset(types) and is_classed(types):
            with RedirectMode():
                return call_classed(func, types, args, kwargs or {})
        return redirect(func, args, kwargs or {})


def in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` wrapped in a mode of its own.

    A mode is off while it handles a call: without this, the script's functions inside would run without the mode.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with RedirectMode():
            return function(*args, **kwargs)

    return run


@contextmanager
def without_redirection() -> Iterator[None]:
    """While active, PyTorch calls are not looked at, and ``device="cuda"`` is an error.

    Where PyTorch has CUDA, calls go on being redirected: nothing may come to be on a GPU of this process.
    """
    mode = _pop_mode() if _len_torch_function_stack() == 1 and not torch.backends.cuda.is_built() else None
    if mode is not None and type(mode) is not RedirectMode:
        _push_mode(mode)
        mode = None
    try:
        yield
    finally:
        if mode is not None:
            _push_mode(mode)


def remove_mode(mode: RedirectMode) -> None:
    """Removes `mode` from this thread's stack, at any position."""
    above = []
    while _len_torch_function_stack():
        top = _pop_mode()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        _push_mode(other)


def redirect(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func` with "cuda" meaning the accelerator."""
    handler = _HANDLERS.get(func)
    return _make(func, args, kwargs) if handler is None else handler(func, args, kwargs)


def redirect_host(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func`, an argument of which is a host tensor."""
    if len(types) > 1 and not ORDINARY.issuperset(kind for kind in types if kind is not HostTensor):
        args, kwargs = tree_map_only(HostTensor, on_accelerator, (args, kwargs))
        with RedirectMode():
            return func(*args, **kwargs)
    handler = _HANDLERS.get(func)
    return host_functions.call(func, args, kwargs) if handler is None else handler(func, args, kwargs)


def _make(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls `func` on the device that its arguments, or the defaults, name."""
    device = kwargs.get("device")
    if device is None and func in _FACTORIES:
        device = torch_device_context.CURRENT_DEVICE
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}  # as `transfers.pin_memory`
    if device is not None and is_accelerator(device):
        return _make_on_accelerator(func, args, kwargs)
    outer, ASKED.arguments = ASKED.arguments, (args, kwargs)
    try:
        if torch.is_autocast_enabled("cuda") and getattr(func, "__name__", "") not in ("__get__", "__set__"):
            return autocast.run(func, args, kwargs)
        return func(*args, **kwargs)
    finally:
        ASKED.arguments = outer


def _make_on_accelerator(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    requires_grad = bool(kwargs.get("requires_grad", False))
    rest = {name: value for name, value in kwargs.items() if name not in ("requires_grad", "pin_memory")}
    kwargs = {**rest, "device": "cpu"}
    if _HANDLERS.get(func) is not _from_data or not isinstance(args[0], (list, tuple)):
        args, kwargs = _read((args, kwargs))
    made = func(*args, **kwargs)
    if not isinstance(made, Tensor):
        return made
    source = next((arg for arg in args if isinstance(arg, Tensor)), None)
    shares_memory = made is source or made._is_view() or func in _MAY_SHARE_MEMORY
    tensor = put(wrapped_tensors.untracked(made.detach().clone() if shares_memory else made))
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _untyped_storage(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].memory if isinstance(args[0], VirtualTensor) else func(*args, **kwargs)


def _data_ptr(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args[0].memory.tensor_address if isinstance(args[0], VirtualTensor) else func(*args, **kwargs)


def _set_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``parameter.data = value`` with a value on the accelerator moves a parameter from the CPU to the accelerator."""
    tensor, value = args
    if isinstance(tensor, VirtualTensor) or not isinstance(value, VirtualTensor):
        return func(*args, **kwargs)
    moved: Tensor = value.detach().requires_grad_(tensor.requires_grad)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    transfers.swap(tensor, torch.nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved)
    return None


def _whole(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Computes composite functions of PyTorch in the controller, since the tensors that these make are on the CPU."""
    moved = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VirtualTensor) and leaf.is_cuda]
    if not moved:
        return func(*args, **kwargs)
    if all(type(leaf) is HostTensor for leaf in moved):
        return mark(host_functions.compute(func, args, kwargs))
    on_host = tree_map_only(VirtualTensor, lambda tensor: move(tensor, "cpu"), (args, kwargs))
    return tree_map_only(Tensor, transfers.to_accelerator, func(*on_host[0], **on_host[1]))


def _of_parts(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Makes a sparse tensor of host tensors one, unless the script names a device: PyTorch asks no class of theirs."""
    is_held = kwargs.get("device") is None and has_host_tensor((args, kwargs))
    return (_whole if is_held else _make)(func, args, kwargs)


def _pack_or_pad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    rows, counts = _whole(func, args, kwargs)
    return rows, move(counts, "cpu")  # numbers of rows, and lengths, are on the CPU on every device


def _from_data(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``torch.tensor([loss, other_loss])``, which PyTorch would read from memory that virtual tensors do not have."""
    name = "obj" if func is torch.asarray else "data"
    if name in kwargs:
        args, kwargs = (kwargs[name], *args), {other: value for other, value in kwargs.items() if other != name}
    if not args:
        return func(**kwargs)  # PyTorch has its own error for it
    if type(args[0]) is HostTensor:
        return host_functions.call(func, args, kwargs)
    try:
        return _make(func, args, kwargs)
    except RuntimeError:
        if not has_accelerator_tensor(args):  # long lists of numbers are not searched before they fail
            raise
    return _make(func, _read(args), kwargs)


def _read(tree: Any) -> Any:
    """Returns `tree` with a CPU tensor for each tensor on the accelerator; may wait."""
    return tree_map_only(VirtualTensor, lambda tensor: tensor.to_host(), tree)


def _new(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], VirtualTensor) or not args[0].is_cuda:
        return func(*args, **kwargs)
    given = _read(args[1:])
    return transfers.to_accelerator(torch.empty(0, dtype=args[0].dtype, device="cpu").new(*given))


def _new_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], VirtualTensor):
        return func(*args, **kwargs)
    like = {"dtype": args[0].dtype, "device": args[0].device}
    given = {name: value for name, value in kwargs.items() if value is not None and name != "data"}
    return redirect(torch.tensor, (args[1] if len(args) > 1 else kwargs["data"],), {**like, **given})


def _grad(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    backend = IN_FORCE.backend
    if backend is None:
        return func(*args, **kwargs)
    found = backend.gradients(func, args, kwargs)
    if KNOWN.hooks:
        named = (args[1],) if isinstance(args[1], Tensor) else args[1]
        found = tuple(map(changed, named, found))
    if has_host_tensor(args[1]):
        inputs = (args[1],) if isinstance(args[1], Tensor) else args[1]
        mark([gradient for one, gradient in zip(inputs, found) if type(one) is HostTensor])
    return found


def _backward(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    backend = IN_FORCE.backend
    if KNOWN.hooks and not KNOWN.are_waiting:
        with after_backward():
            return _backward(func, args, kwargs)
    return func(*args, **kwargs) if backend is None else backend.backward(func, args, kwargs)


def _backward_of_tensor(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if KNOWN.hooks and not KNOWN.are_waiting:
        with after_backward():
            return _backward_of_tensor(func, args, kwargs)
    backend, tensor = IN_FORCE.backend, args[0]
    if type(tensor) is HostTensor and kwargs.get("inputs") is None and len(args) < 5:
        with without_class([one for one in (*args, *kwargs.values()) if type(one) is HostTensor]):
            return func(*args, **kwargs)
    is_beyond = kwargs.get("gradient") is not None or kwargs.get("inputs") is not None or kwargs.get("create_graph")
    if len(args) == 1 and not is_beyond and isinstance(tensor, VirtualTensor):
        with torch._C.DisableTorchFunction():
            is_plain = tensor.numel() == 1 and tensor.is_floating_point()  # PyTorch has its own error for others
            one = place(torch.ones(tensor.shape, dtype=tensor.dtype)) if is_plain else None
        if is_plain:
            with torch._C.DisableTorchFunctionSubclass():
                return func(tensor, **{**kwargs, "gradient": one})
    return func(*args, **kwargs) if backend is None else backend.backward_of_tensor(func, args, kwargs)


def _device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    by_number = len(args) == 1 and type(args[0]) is int and not kwargs
    return torch.device("cuda", args[0]) if by_number else func(*args, **kwargs)


def _parse_move_of_module(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """``model.to(0)``, of which a PyTorch without CUDA makes an error or, by name, the CPU."""
    args = [_device(torch.device, (arg,), {}) if type(arg) is int else arg for arg in args]
    if type(kwargs.get("device")) is int:
        kwargs = {**kwargs, "device": _device(torch.device, (kwargs["device"],), {})}
    return func(*args, **kwargs)


_HANDLERS: dict[Any, Callable[[Any, Any, dict[str, Any]], Any]] = {
    torch.Tensor.to: transfers.to_tensor,
    torch.Tensor.type_as: transfers.type_as,
    torch.Tensor.cuda: transfers.cuda_tensor,
    torch.Tensor.cpu: transfers.cpu_tensor,
    torch.Tensor.pin_memory: transfers.pin_memory,
    torch.Tensor.type: transfers.type_of,
    torch.Tensor.new: _new,
    torch.Tensor.new_tensor: _new_tensor,
    torch.tensor: _from_data,
    torch.as_tensor: _from_data,
    torch.asarray: _from_data,
    torch.Tensor.untyped_storage: _untyped_storage,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: wrapped_tensors.device_of,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__: wrapped_tensors.is_cuda,  # type: ignore[attr-defined]
    torch.Tensor.backward: _backward_of_tensor,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.device: _device,
    torch._C._nn._parse_to: _parse_move_of_module,
    torch._C._VariableFunctions._pack_padded_sequence: _pack_or_pad,
    torch._C._VariableFunctions._pad_packed_sequence: _pack_or_pad,
    **dict.fromkeys(
        (
            torch.sparse_coo_tensor,
            torch.sparse_compressed_tensor,
            torch.sparse_csr_tensor,
            torch.sparse_csc_tensor,
            torch.sparse_bsr_tensor,
            torch.sparse_bsc_tensor,
        ),
        _of_parts,
    ),
    **dict.fromkeys(
        (
            torch.Tensor.__index__,
            torch.nn.functional.one_hot,
            torch.nn.functional.ctc_loss,
            torch._C._nn.pad_sequence,
            torch.combinations,
            torch.quantile,
            torch.nanquantile,
            torch.Tensor.quantile,
            torch.Tensor.nanquantile,
            torch.vander,
            torch.sparse.mm,
            torch.unravel_index,
            torch.tensor_split,
            torch.Tensor.tensor_split,
            torch.svd_lowrank,
            torch.pca_lowrank,
            torch.linalg.matrix_rank,
            torch.fft.hfft,
            torch.fft.hfft2,
            torch.fft.hfftn,
            torch.nn.functional.embedding_bag,
            torch.nn.functional.fractional_max_pool2d,
            torch.nn.functional.fractional_max_pool3d,
            torch.nn.functional.fractional_max_pool2d_with_indices,
            torch.nn.functional.fractional_max_pool3d_with_indices,
        ),
        _whole,
    ),
}

VirtualTensor.torch_function = staticmethod(redirect)
HostTensor.function = staticmethod(redirect_host)
