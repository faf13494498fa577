"""Every change that the one line makes to other people's modules, in one list, each undoable.

Nothing else in this package assigns to attributes of PyTorch. `install` makes the changes, `undo` takes them back; both
may be called any number of times. In a forked child (a loader worker) they are undone at once: processes that a script
starts are its own.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moreh_ap.device import function_mode, lazy_modules, legacy_types, transfers
from moreh_ap.device.patches import cuda_streams, export, profilers, serialization, unsupported
from moreh_ap.device.patches.cuda import Facade
from moreh_ap.device.patches.cuda_generator import Generator
from moreh_ap.device.patches.cuda_rng import RandomState
from moreh_ap.device.tensor import VirtualTensor, has_accelerator_tensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.integrations.import_hook import when_imported
from moreh_ap.integrations.transformers_worker import hand_caches_back

if TYPE_CHECKING:
    from moreh_ap.session.models.model_registry import Units
    from moreh_ap.session.session import Session


class Patches:
    """The changes in force; `undo` restores what was there before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, holder: Any, name: str, new: Any) -> Any:
        """Set ``holder.name`` to `new`; returns what was there."""
        own = name in vars(holder)
        before = getattr(holder, name)
        setattr(holder, name, new)
        self._undo.append(lambda: setattr(holder, name, before) if own else delattr(holder, name))
        return before

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have `action` called when the changes are taken back."""
        self._undo.append(action)

    def undo(self) -> None:
        """Take every change back, last first."""
        while self._undo:
            self._undo.pop()()


def install(session: Session, units: Units) -> Patches:
    """Make "cuda" mean the accelerator of `session` in this process."""
    patches = Patches()
    _redirect_devices(patches)
    facade = Facade(session)
    own_streams = cuda_streams.replacements(session)
    random_state = RandomState(session).replacements()
    for holder, functions in (
        (torch.cuda, {**facade.replacements(), **own_streams, **random_state}),
        (torch.cuda.random, random_state),
        (torch.cuda.memory, facade.memory_replacements()),
        (torch.cuda, legacy_types.replacements()),
        (torch.accelerator, {**facade.accelerator_replacements(), "current_stream": own_streams["current_stream"]}),
    ):
        for name, function in functions.items():
            if hasattr(holder, name):  # later versions of PyTorch have more of them
                patches.replace(holder, name, function)
    patches.replace(torch.cuda, "_lazy_init", lambda: None)
    for name in ("_exchange_device", "_maybe_exchange_device"):  # ``with torch.cuda.device(0)``
        patches.replace(torch.cuda, name, _exchange_device)
    patches.replace(torch, "Generator", Generator)
    unsupported.install(patches)
    export.install(patches)
    profilers.install(patches)
    _redirect_compiler(patches)
    _redirect_modules(patches, units)
    _redirect_optimizers(patches, session)
    _redirect_clipping(patches, session)
    _FORK_HOOK.current = patches
    return patches


def _exchange_device(index: int) -> int:
    """The device that was current before, as PyTorch's function tells it: the one there is, or -1 for no change."""
    if index < 0:
        return -1
    transfers.require_accelerator(index)
    return 0


def _leave_unpinned(patches: Patches, loaders: types.ModuleType) -> None:
    cls: Any = loaders._BaseDataLoaderIter  # type: ignore[attr-defined]

    @functools.wraps(cls.__init__)
    def init(iterator: Any, loader: Any) -> None:
        original(iterator, loader)
        iterator._pin_memory = False

    original = patches.replace(cls, "__init__", init)


class _ForkHook:
    """Undoes the changes in a forked child."""

    def __init__(self) -> None:
        self.current: Patches | None = None
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        if self.current is not None:
            self.current.undo()


_FORK_HOOK = _ForkHook()


# -- devices -------------------------------------------------------------------------------------------------------


def _redirect_devices(patches: Patches) -> None:
    function_mode.ACTIVE.on = True
    mode = function_mode.RedirectMode()
    mode.__enter__()

    def leave() -> None:
        function_mode.ACTIVE.on = False  # other threads may still have the mode on their stacks
        function_mode.remove_mode(mode)

    patches.on_undo(leave)

    # A mode belongs to one thread: threads started later enter it for themselves.
    def bootstrap(thread: threading.Thread) -> None:
        with function_mode.RedirectMode():
            start(thread)

    start = patches.replace(threading.Thread, "_bootstrap_inner", bootstrap)

    # A mode is off while it handles a call: functions of the script that a backward runs would be without it.
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with function_mode.RedirectMode():
            return original_run_backward(*args, **kwargs)

    original_run_backward = patches.replace(torch.autograd, "_engine_run_backward", run_backward)

    # There is nothing to pin, and no thread of a loader is needed for it.
    patches.on_undo(when_imported("torch.utils.data.dataloader", lambda loaders: _leave_unpinned(patches, loaders)))
    patches.replace(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    patches.replace(torch.Tensor, "is_pinned", lambda tensor, device=None: False)
    # A stream of the accelerator does what it is told in order: no memory is used again before its time.
    patches.replace(torch.Tensor, "record_stream", lambda tensor, stream: None)
    _redirect_sharing(patches)
    # ``torch.Tensor([loss, other_loss])``: a class, which no mode sees.
    patches.replace(torch.Tensor, "__new__", staticmethod(legacy_types.with_host_values(torch.Tensor.__new__)))

    acceptable = torch.backends.cudnn.is_acceptable
    # `nn.LSTM` asks whether to lay its weights out for cuDNN, and warns if there is none; workers ask for themselves.
    patches.replace(
        torch.backends.cudnn,
        "is_acceptable",
        lambda tensor: not isinstance(tensor, VirtualTensor) and acceptable(tensor),
    )

    serialization.install(patches)

    def set_default_tensor_type(asked: Any) -> None:
        dtype = legacy_types.dtype_of(asked)
        if dtype is None:
            original_set_default(asked)
        else:
            torch.set_default_dtype(dtype)
        torch.set_default_device(None if dtype is None else "cuda")

    original_set_default = patches.replace(torch, "set_default_tensor_type", set_default_tensor_type)


def _redirect_sharing(patches: Patches) -> None:
    """What is on a device all processes can share; a model on the accelerator none but this one."""

    def share_memory(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, VirtualTensor) else original(tensor)

    def reduce(tensor: VirtualTensor) -> Any:
        if getattr(tensor, "_is_param", False):
            raise UnsupportedError(
                f"A parameter of shape {tuple(tensor.shape)} goes to another process, which would train a copy.",
                allowed="Models on the accelerator in the script's own process and its threads.",
                fix="model.cpu()  # before multiprocessing.Process(target=train, args=(model,))",
            )
        return tensor.__reduce_ex__(2)

    original = patches.replace(torch.Tensor, "share_memory_", share_memory)
    ForkingPickler.register(VirtualTensor, reduce)
    patches.on_undo(lambda: ForkingPickler._extra_reducers.pop(VirtualTensor, None))  # type: ignore[attr-defined]


def _redirect_compiler(patches: Patches) -> None:
    """What is compiled runs as it is written: there is nothing in the controller to make code for."""

    def run_as_written() -> None:
        stance = torch.compiler.set_stance("force_eager")
        patches.on_undo(lambda: stance.__exit__(None, None, None))  # as at the end of a `with` block

    @functools.wraps(torch.compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if not told:
            told.append(True)
            run_as_written()
        return original_compile(*args, **kwargs)

    told: list[bool] = []
    if "torch._dynamo" in sys.modules:  # importing it takes a second, so that it is left to those who compile
        told.append(True)
        run_as_written()
    original_compile = patches.replace(torch, "compile", compile)


# -- modules -------------------------------------------------------------------------------------------------------


def _redirect_modules(patches: Patches, units: Units) -> None:
    from moreh_ap.session.calls.remote_call import call_remotely
    from moreh_ap.session.models.model_registry import refuse_compiled
    from moreh_ap.session.models.script_hooks import RunsHereOnly

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        parameter = next(module.parameters(), None)
        # A transform of `torch.func` needs every operation: under one, a model is computed in the controller.
        if parameter is None or torch._C._functorch.peek_interpreter_stack() is not None:
            return original_call(module, *args, **kwargs)
        if torch._C._get_tracing_state() is not None and parameter.is_cuda:
            raise UnsupportedError(
                f"torch.jit.trace follows operations of this process, and {type(module).__name__} runs on the workers.",
                allowed="Tracing and exporting models that are on the CPU.",
                fix="torch.jit.trace(model.cpu(), example.cpu())  # then model.cuda() to go on",
            )
        if not parameter.is_cuda and has_accelerator_tensor((args, kwargs)):
            if lazy_modules.has_no_shapes(module):
                lazy_modules.give_shapes(module, args, kwargs, original_call)
            module.cuda()  # scripts of the platform call a model with accelerator inputs without moving it first
        unit, hooks_done = units.find(module, args, kwargs), 0
        while unit is not None:
            try:
                result = call_remotely(*unit, args, kwargs, hooks_done)
            except RunsHereOnly as hook:
                unit, hooks_done = units.find(module, args, kwargs), hook.done
            else:
                hand_caches_back((*args, *kwargs.values()), result)
                return result
        if isinstance(parameter, VirtualTensor) and not parameter.is_cuda:
            module._apply(_read_into_controller)  # a model that is to stay on the CPU after all
        return original_call(module, *args, **kwargs)

    original_call = patches.replace(nn.Module, "__call__", call)

    depth = threading.local()

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        if getattr(depth, "inside", False):
            return original_apply(module, fn, recurse)
        if isinstance(module, torch.jit.ScriptModule) and isinstance(fn(torch.empty(0)), VirtualTensor):
            refuse_compiled(module)
        if lazy_modules.has_no_shapes(module) and isinstance(fn(torch.empty(0)), VirtualTensor):
            return module  # its first call with accelerator tensors moves it
        depth.inside = True
        _let_go_of_graphs(module)
        swap = torch.__future__.get_swap_module_params_on_conversion()
        # A virtual parameter is never turned into another by `.data =`: its object stays, what it is changes.
        on_accelerator = isinstance(next(module.parameters(), None), VirtualTensor)
        torch.__future__.set_swap_module_params_on_conversion(swap or on_accelerator)
        try:
            return original_apply(module, fn, recurse)
        finally:
            depth.inside = False
            torch.__future__.set_swap_module_params_on_conversion(swap)
            units.note_moved(module)

    original_apply = patches.replace(nn.Module, "_apply", apply)

    def swap_tensors(first: Tensor, second: Tensor) -> None:
        is_virtual = isinstance(first, VirtualTensor) or isinstance(second, VirtualTensor)
        (transfers.swap if is_virtual else original_swap)(first, second)

    original_swap = patches.replace(torch.utils, "swap_tensors", swap_tensors)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        original_set(module, name, value)
        if name not in ("training", "_compiled_call_impl"):
            units.note_attribute(module, name, value)

    original_set = patches.replace(nn.Module, "__setattr__", set_attribute)


def _let_go_of_graphs(module: nn.Module) -> None:
    """What a module has computed from its parameters (`nn.utils.weight_norm` does) would keep them from moving."""
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                part.__dict__[name] = value.detach()


def _read_into_controller(tensor: Tensor) -> Tensor:
    return tensor.to_host() if isinstance(tensor, VirtualTensor) else tensor


# -- optimizers ------------------------------------------------------------------------------------------------------


def _redirect_optimizers(patches: Patches, session: Session) -> None:
    from moreh_ap.session.models.remote_optimizer import elementwise_optimizers, step_remotely

    def wrap(cls: type[torch.optim.Optimizer]) -> None:
        original = cls.step

        @functools.wraps(original)
        def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            taken, loss = step_remotely(session, optimizer, closure)
            return loss if taken else original(optimizer, closure)

        if hasattr(original, "hooked"):
            step.hooked = original.hooked  # type: ignore[attr-defined]
        patches.replace(cls, "step", step)

    for cls in elementwise_optimizers():
        wrap(cls)


def _redirect_clipping(patches: Patches, session: Session) -> None:
    from moreh_ap.session.calls import clipping

    # `clip_grad_norm_` is imported by name everywhere, so its two halves are redirected: it looks them up when called.
    module: types.ModuleType = sys.modules["torch.nn.utils.clip_grad"]

    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = clipping.norm_on_workers(session, tensors, *args, **kwargs)
        return original_norm(tensors, *args, **kwargs) if norm is None else norm

    def clip_grads_with_norm(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not clipping.clip_on_workers(session, parameters, max_norm, total_norm):
            original_clip(parameters, max_norm, total_norm, *args, **kwargs)

    original_norm = patches.replace(module, "_get_total_norm", get_total_norm)
    original_clip = patches.replace(module, "_clip_grads_with_norm_", clip_grads_with_norm)
