"""Functions of PyTorch with host tensors among their arguments: PyTorch computes, and the results are host tensors.

Decides what is done with the other arguments: tensors on the CPU, which one device would refuse, and other virtual
tensors. Must not know which functions mean something else on the accelerator: `function_mode` asks those first.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device import autocast
from moreh_ap.device.host_tensors import CLASSES, HostTensor, as_host, mark, may_be_held, on_accelerator, without_class
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.transfers import is_accelerator

_NO_TENSORS = frozenset({int, float, bool, complex, str, type(None), slice, type(...), torch.dtype, torch.Size})

_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
_COPY = {Tensor.copy_, Tensor.__setitem__, Tensor.__getitem__, Tensor.index_put_, Tensor.index_put}
_BOTH_DEVICES = frozenset(_COPY | _RECURRENT)
"""Functions that copy, or take indices, from another device, or take counts of packed rows, which are on the CPU."""

_SIZE_OF_OTHER = frozenset({Tensor.expand_as, Tensor.view_as, Tensor.reshape_as})
"""Functions that ask their second argument for its size alone: the result is where the first one is."""

_without_subclasses = torch._C._disabled_torch_function_impl  # calls a function; no class of an argument is asked

_WRITE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__")
_WRITE_FIRST = frozenset({*_WRITE, "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"})


def call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function of PyTorch some of whose arguments are host tensors.

    Raises:
        RuntimeError: Another argument is on the CPU.
    """
    if kwargs:
        if "device" in kwargs or "pin_memory" in kwargs:
            return _call_on_device(func, args, kwargs)
        for arg in kwargs.values():
            if type(arg) is not HostTensor and type(arg) not in _NO_TENSORS and not _are_no_tensors(arg):
                return _wait_and_call_with_others(func, args, kwargs)
    for arg in args:
        if type(arg) is not HostTensor and type(arg) not in _NO_TENSORS and not _are_no_tensors(arg):
            return _wait_and_call_with_others(func, args, kwargs)
    if type(func) is FunctionType or torch.is_autocast_enabled("cuda"):
        return mark(_compute(func, args, kwargs, (*args, *kwargs.values())))
    result = _without_subclasses(func, (), args, kwargs)
    if type(result) is Tensor:
        result.__class__ = HostTensor
        return result
    return mark(result)


def _are_no_tensors(arg: object) -> bool:
    """Returns whether an argument is a tuple or list of numbers and the like, such as a shape."""
    return type(arg) in (tuple, list) and all(type(one) in _NO_TENSORS for one in arg)  # type: ignore[attr-defined]


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns what PyTorch returns for host tensors and ordinary ones: ordinary tensors."""
    return _compute(func, args, kwargs, tree_leaves((args, kwargs)))


def _compute(func: Any, args: Any, kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
    is_cast = torch.is_autocast_enabled("cuda") and getattr(func, "__name__", "") not in ("__get__", "__set__")
    if type(func) is not FunctionType and not is_cast:
        return _without_subclasses(func, (), args, kwargs)
    # A function in Python may ask for the device of an argument.
    with CLASSES, without_class([leaf for leaf in leaves if type(leaf) is HostTensor]):
        return autocast.run_on_device(func, args, kwargs) if is_cast else func(*args, **kwargs)


def _wait_and_call_with_others(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """As `_call_with_others`, once no other thread has taken the class off an argument."""
    with CLASSES:
        return _call_with_others(func, args, kwargs)


def _call_with_others(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a function where an argument is a list, a tensor on the CPU or another virtual tensor."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    virtual = [one for one in tensors if type(one) is not HostTensor and isinstance(one, VirtualTensor)]
    if virtual:
        return _call_with_virtual(func, args, kwargs, virtual)
    if func in _SIZE_OF_OTHER:
        result = compute(func, args, kwargs)
        return mark(result) if type(tensors[0]) is HostTensor else result
    others = [one for one in tensors if type(one) is not HostTensor]
    is_two_devices = any(one.dim() > 0 for one in others) and not _may_be_on_two_devices(func, others, args)
    if is_two_devices and _writes_first(func):
        raise _two_devices(func)
    result = compute(func, args, kwargs)
    if is_two_devices and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
        raise _two_devices(func)
    return result if any(result is one for one in others) else mark(result)


def _call_on_device(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    device = kwargs.get("device")
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    if device is None or is_accelerator(device):
        return call(func, args, rest)
    return compute(func, args, {**rest, "device": device})


def _call_with_virtual(func: Any, args: Any, kwargs: dict[str, Any], virtual: list[VirtualTensor]) -> Any:
    """Calls a function on host tensors and other virtual ones: on host tensors, if no value is elsewhere."""
    writes = _writes_first(func)
    keeps_first = writes and args[0] is virtual[0] and virtual[0].grad_fn is not None
    if (all(map(may_be_held, virtual)) and not keeps_first) or (writes and type(args[0]) is HostTensor):
        args, kwargs = tree_map_only(VirtualTensor, as_host, (args, kwargs))
        return call(func, args, kwargs)
    args, kwargs = tree_map_only(HostTensor, on_accelerator, (args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return VirtualTensor.torch_function(func, args, kwargs)


def _writes_first(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITE_FIRST or (name.endswith("_") and not name.endswith("__"))


def _may_be_on_two_devices(func: Any, others: list[Tensor], args: Any) -> bool:
    if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return True  # tensors that PyTorch makes in a backward, or inside a transform, are not marked
    return func in _BOTH_DEVICES and not (func is Tensor.__getitem__ and args[0] is others[0])


def _two_devices(func: Any) -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:0 and cpu! (when checking arguments of {getattr(func, '__name__', func)})"
    )
