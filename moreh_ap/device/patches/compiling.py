"""`torch.compile` in the script: nothing is compiled in its process, and what it asks for is noted for the workers.

Decides what counts as compiled by the script. Which parts of that are compiled is for the plan to say.
"""

from __future__ import annotations

import functools
import os
import sys
import types
import weakref
from collections.abc import Callable, MutableMapping, MutableSet
from typing import Any

import torch
from torch import nn

from moreh_ap.device.worker_backend import WorkerBackend
from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.patching import Patches
from moreh_ap.protocol.messages.compile_requests import CompileRequest, CompileRequests
from moreh_ap.protocol.process_flags import run_as_written, uncompiled

_OF_MODULES: MutableMapping[nn.Module, CompileRequest] = IdentityTable()
_OF_FUNCTIONS: MutableMapping[Callable[..., Any], CompileRequest] = weakref.WeakKeyDictionary()
_DECLINED: MutableMapping[nn.Module, None] = IdentityTable()
_DECLINED_FUNCTIONS: MutableSet[Callable[..., Any]] = weakref.WeakSet()
_SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
_OF_A_MODULE = ("forward", "__call__", "_call_impl")
"""Methods that are compiled in place of their module: `Module.compile` gives `torch.compile` the last."""


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Has compiled models run as written in this process, and notes for the workers which these are."""
    group = patches.group("Models are compiled where they are computed: in the workers.")

    @functools.wraps(torch.compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if not told:
            told.append(True)
            run_as_written(group)
        compiled = original_compile(*args, **kwargs)
        model = args[0] if args else kwargs.get("model")
        if model is None:  # a decorator, which calls this again
            return compiled
        if kwargs.get("disable"):
            _note_declined(model)
        elif compiled is not model:
            _note(model, compiled, _request_of(**{**kwargs, "model": None}), backend)
        return compiled

    told: list[bool] = []
    if "torch._dynamo" in sys.modules:  # the import takes a second, so only scripts that compile do it
        told.append(True)
        run_as_written(group)
    effect = "Notes what is to be compiled in the workers; here it runs as it is written."
    original_compile = group.replace(torch, "compile", compile, effect)


def compiled_in(root: nn.Module) -> CompileRequests:
    """Returns the modules of a model that the script has compiled, with the options that it gave."""
    if _is_switched_off():
        return ()
    found = ((path, _options_of(module)) for path, module in root.named_modules())
    return tuple((path, request) for path, request in found if request is not None)


def declined_in(root: nn.Module) -> bool:
    """Says whether the script wants the model, or a part of it, to run as it is written."""
    return _is_switched_off() or any(_is_declined(module) for module in root.modules())


def _is_declined(module: nn.Module) -> bool:
    return module in _DECLINED or type(module).forward in _DECLINED_FUNCTIONS


def _is_switched_off() -> bool:
    """Says whether the environment switches PyTorch's compiler off, here and in the workers."""
    return any(os.environ.get(variable) == "1" for variable in _SWITCHES)


def _note_declined(model: Any) -> None:
    """Notes what the script has compiled with ``disable=True``."""
    module = _module_of(model)
    if isinstance(module, nn.Module):
        _DECLINED[module] = None
        _OF_MODULES.pop(module, None)
    elif isinstance(module, types.FunctionType):
        _DECLINED_FUNCTIONS.add(module)


def _module_of(model: Any) -> Any:
    """Returns the module of one of the methods in `_OF_A_MODULE`; anything else as it is."""
    if isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module) and model.__name__ in _OF_A_MODULE:
        return model.__self__
    return model


def _note(model: Any, compiled: Any, request: CompileRequest, backend: WorkerBackend) -> None:
    model = _module_of(model)
    if isinstance(model, nn.Module):
        _DECLINED.pop(model, None)
        is_new = _OF_MODULES.get(model) != request
        _OF_MODULES[model] = request
        if is_new:
            backend.note_compiled(model)
    elif isinstance(compiled, types.FunctionType):
        _OF_FUNCTIONS[compiled] = request


def _request_of(
    *,
    model: None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: Any = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **others: Any,
) -> CompileRequest:
    name = "inductor" if backend is None else backend if isinstance(backend, str) else ""
    return CompileRequest(name, mode, dynamic, fullgraph, dict(options) if options else None)


def _options_of(module: nn.Module) -> CompileRequest | None:
    """Returns the options with which a module was compiled, None if it was not; defaults if they were not noted."""
    if module in _OF_MODULES:
        return _OF_MODULES[module]
    if _is_declined(module):
        return None
    forward = type(module).forward
    if uncompiled(forward) is not forward:
        return _OF_FUNCTIONS.get(forward, CompileRequest())
    return CompileRequest() if vars(module).get("_compiled_call_impl") is not None else None
