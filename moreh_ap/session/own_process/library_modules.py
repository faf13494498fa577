"""Calls of modules all of whose code is PyTorch's, on host tensors: computed as on the CPU, without a look at each
operation.

Decides which modules these are, anew at each call, and what their tensors look like meanwhile. Must not know which
models run in this process: `small_models.py` does.

[Note: modules of PyTorch]
A host tensor costs the function mode's way through Python at each operation, since the script may have named a device
or have CPU tensors beside it. The layers of `torch.nn` name no device but that of their tensors. So a call of such a
layer, or of a tree of them (`nn.Sequential`, `nn.TransformerEncoder`), takes the class off the parameters, buffers and
arguments, and gives it to these and to the results at the end. With hooks, functions of the script among the
attributes, or other arguments than host tensors and numbers, the function mode sees each operation, as in any other
module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.overrides import _len_torch_function_stack

from moreh_ap.device.host_tensors import CLASSES, HostTensor, mark, without_class

_NO_TENSORS = frozenset({int, float, bool, type(None)})

_LAYERS = "torch.nn.modules."

_REPLACEABLE = ("forward", "activation", "distance_function", "_compiled_call_impl")
"""Attributes of modules of PyTorch by which a script can have code of its own called."""


def call_at_once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a module's call with host tensors; NotImplemented where the script may have a part in it.

    Args:
        module: A module that runs in this process.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    with CLASSES:
        return _call_at_once(module, args, kwargs)


def _call_at_once(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []
    for arg in (*args, *kwargs.values()):
        if type(arg) is HostTensor:
            tensors.append(arg)
        elif type(arg) not in _NO_TENSORS:
            return NotImplemented
    if not _add_state(module, tensors):
        return NotImplemented
    if _len_torch_function_stack() != 1 or torch.is_autocast_enabled("cuda") or torch_modules._has_any_global_hook():
        return NotImplemented
    with without_class(tensors), torch._C.DisableTorchFunction():
        result = module._call_impl(*args, **kwargs)
    return mark(result)


def _add_state(root: nn.Module, tensors: list[Tensor]) -> bool:
    """Adds the parameters and buffers of a module to `tensors`; returns whether all of its code is PyTorch's."""
    modules: list[nn.Module | None] = [root]
    for module in modules:
        if module is None:
            continue
        kind, attributes = type(module), module.__dict__
        if not kind.__module__.startswith(_LAYERS) or not kind.forward.__module__.startswith(_LAYERS):
            return False
        if (
            attributes["_forward_hooks"]
            or attributes["_forward_pre_hooks"]
            or attributes["_backward_hooks"]
            or attributes["_backward_pre_hooks"]
        ):
            return False
        for name in _REPLACEABLE:
            own = attributes.get(name)
            if own is not None and str(getattr(own, "__module__", "")).partition(".")[0] != "torch":
                return False
        for state in (attributes["_parameters"], attributes["_buffers"]):
            for tensor in state.values():
                if type(tensor) is HostTensor:
                    tensors.append(tensor)
                elif tensor is not None:
                    return False
        modules.extend(attributes["_modules"].values())
    return True
