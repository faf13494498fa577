"""Modules: their calls, moves between devices, and attributes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from moreh_ap.device import lazy_modules, transfers
from moreh_ap.device.patches.shared_parameters import sharing, warn_of_copies
from moreh_ap.device.tensor import VirtualTensor, has_accelerator_tensor
from moreh_ap.device.tensor_classes import ClassedTensor, result_of_module
from moreh_ap.device.torchscript import refuse_compiled
from moreh_ap.device.worker_backend import WorkerBackend
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches, PatchGroup
from moreh_ap.protocol.module_attributes import OF_EACH_PROCESS

_NOWHERE = None, None

_NOT_SENT = frozenset({"training", "_compiled_call_impl"}) | OF_EACH_PROCESS
"""Attributes that travel with calls, or that every process keeps for itself."""


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have modules on the accelerator be called on the workers, and moves and attributes be noted."""
    group = patches.group("Modules on the accelerator are computed by the workers.")
    _install_calls(group, backend)
    _install_moves(group, backend)
    _install_attributes(group, backend)


def _install_calls(group: PatchGroup, backend: WorkerBackend) -> None:
    routes = backend.routes.by_id

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Calls a module on the workers if it is on the accelerator."""
        # A transform of `torch.func`, and forward-mode differentiation, need every operation: the controller computes
        # the model.
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
        is_traced = torch._C._get_tracing_state() is not None
        _, route = _NOWHERE if is_transformed or is_traced else routes.get(id(module), _NOWHERE)
        if route is not None:
            result = route(args, kwargs)
            if result is not NotImplemented:
                return result_of_module(result, args, kwargs) if _have_classes(args, kwargs) else result
        parameter = next(iter(module.parameters()), None)
        if parameter is None or is_transformed:
            return original_call(module, *args, **kwargs)
        if is_traced and parameter.is_cuda:
            raise UnsupportedError(
                f"torch.jit.trace follows operations of this process, and {type(module).__name__} runs on the workers.",
                allowed="Tracing and exporting models that are on the CPU.",
                fix="torch.jit.trace(model.cpu(), example.cpu())  # then model.cuda() to go on",
            )
        if not parameter.is_cuda and has_accelerator_tensor((args, kwargs)):
            if lazy_modules.has_no_shapes(module):
                lazy_modules.give_shapes(module, args, kwargs, original_call)
            module.cuda()  # scripts of the platform call a model with accelerator inputs without moving it first
        result = backend.call_module(module, args, kwargs)
        if result is not NotImplemented:
            return result_of_module(result, args, kwargs) if _have_classes(args, kwargs) else result
        if isinstance(parameter, VirtualTensor) and not parameter.is_cuda:
            module._apply(_read_into_controller)  # the model stays on the CPU
        return original_call(module, *args, **kwargs)

    original_call = group.replace(nn.Module, "__call__", call)


def _install_moves(group: PatchGroup, backend: WorkerBackend) -> None:
    depth = threading.local()

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Moves or casts a module whose parameters may be on the accelerator."""
        if getattr(depth, "inside", False):
            return original_apply(module, fn, recurse)
        if isinstance(module, torch.jit.ScriptModule) and isinstance(fn(torch.empty(0)), VirtualTensor):
            refuse_compiled(module)
        if lazy_modules.has_no_shapes(module) and isinstance(fn(torch.empty(0)), VirtualTensor):
            return module  # its first call with accelerator tensors moves it
        depth.inside = True
        _let_go_of_graphs(module)
        swap = torch.__future__.get_swap_module_params_on_conversion()
        # A virtual parameter is never replaced by `.data =`: its object stays, its cell and dtype change.
        on_accelerator = isinstance(next(iter(module.parameters()), None), VirtualTensor)
        torch.__future__.set_swap_module_params_on_conversion(swap or on_accelerator)
        shared = {} if on_accelerator else sharing(module)
        try:
            return original_apply(module, fn, recurse)
        finally:
            depth.inside = False
            torch.__future__.set_swap_module_params_on_conversion(swap)
            warn_of_copies(module, shared, stacklevel=3)
            backend.note_moved(module)

    original_apply = group.replace(nn.Module, "_apply", apply)

    def swap_tensors(first: Tensor, second: Tensor) -> None:
        """Exchanges tensors that may be on the accelerator."""
        is_virtual = isinstance(first, VirtualTensor) or isinstance(second, VirtualTensor)
        (transfers.swap if is_virtual else original_swap)(first, second)

    original_swap = group.replace(torch.utils, "swap_tensors", swap_tensors)


def _install_attributes(group: PatchGroup, backend: WorkerBackend) -> None:
    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute and notes it for the workers."""
        original_set(module, name, value)
        if name not in _NOT_SENT:
            backend.note_attribute(module, name, value)

    def delete_attribute(module: nn.Module, name: str) -> None:
        """Deletes an attribute and notes that for the workers, unless it is a parameter, a buffer or a submodule."""
        is_plain = name in vars(module)
        original_delete(module, name)
        if is_plain:
            backend.note_deleted(module)

    original_set = group.replace(nn.Module, "__setattr__", set_attribute)
    original_delete = group.replace(nn.Module, "__delattr__", delete_attribute)


def _have_classes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an argument is a tensor of a library's class."""
    return any(isinstance(argument, ClassedTensor) for argument in (*args, *kwargs.values()))


def _let_go_of_graphs(module: nn.Module) -> None:
    """Detaches tensors that a module computed from its parameters (`nn.utils.weight_norm`): else these cannot move."""
    for submodule in module.modules():
        for name, value in vars(submodule).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                submodule.__dict__[name] = value.detach()


def _read_into_controller(tensor: Tensor) -> Tensor:
    return tensor.to_host() if isinstance(tensor, VirtualTensor) else tensor
