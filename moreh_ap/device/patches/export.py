"""Tracing, compiling and exporting a model that is on the accelerator: PyTorch gets a copy of it on the CPU.

Tools that trace a model's operations (`torch.jit.trace`, `torch.export`) or compile its code (`torch.jit.script`) need
tensors in this process. The result can be saved and inspected; it belongs to the copy, not to the model.
"""

from __future__ import annotations

import copy
import functools
import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.patching import Patches, PatchGroup
from moreh_ap.protocol.process_flags import run_as_written


def install(patches: Patches) -> None:
    """Have PyTorch's exporters work on copies of models on the accelerator."""
    group = patches.group("What follows a model's operations, or compiles its code, has to find them in this process.")
    for holder, names in ((torch.jit, ("trace", "trace_module", "script")), (torch.export, ("export",))):
        for name in names:
            _redirect(group, holder, name)
    _redirect_compiler(group)
    group.when_imported("torch.onnx", lambda module: _redirect(group, module, "export"))


def _redirect(group: PatchGroup, holder: ModuleType, name: str) -> None:
    @functools.wraps(getattr(holder, name))
    def export(model: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "script" and len(args) < 2:  # it looks for names of annotations where it was called, one frame up
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        if not _is_on_accelerator(model):
            return original(model, *args, **kwargs)
        args, kwargs = tree_map_only(VirtualTensor, VirtualTensor.to_host, (args, kwargs))
        copied = _copy_on_host(model)
        exported = original(copied, *args, **kwargs)
        if any(
            submodule.training for submodule in model.modules()
        ):  # tracing runs the model, which changes running averages
            _take_buffers(model, copied)
        return exported

    original = group.replace(holder, name, export, "Works on a copy on the CPU of a model on the accelerator.")


def _is_on_accelerator(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(
        isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in model.parameters()
    )


def _copy_on_host(model: nn.Module) -> nn.Module:
    copied: dict[int, Any] = {}
    for submodule in model.modules():
        for value in (*submodule._parameters.values(), *submodule._buffers.values(), *vars(submodule).values()):
            if isinstance(value, VirtualTensor):
                host = value.to_host()
                is_parameter = isinstance(value, nn.Parameter)
                copied[id(value)] = nn.Parameter(host, value.requires_grad) if is_parameter else host
    return copy.deepcopy(model, copied)


@torch.no_grad()
def _take_buffers(model: nn.Module, copied: nn.Module) -> None:
    for buffer, now in zip(model.buffers(), copied.buffers(), strict=True):
        if not torch.equal(buffer.cpu(), now):
            buffer.copy_(now)


def _redirect_compiler(group: PatchGroup) -> None:
    """What is compiled runs as it is written: there is nothing in the controller to make code for."""

    @functools.wraps(torch.compile)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if not told:
            told.append(True)
            run_as_written(group)
        return original_compile(*args, **kwargs)

    told: list[bool] = []
    if "torch._dynamo" in sys.modules:  # the import takes a second, so only scripts that compile do it
        told.append(True)
        run_as_written(group)
    effect = "Compiles as ever; what is compiled runs as it is written."
    original_compile = group.replace(torch, "compile", compile, effect)
