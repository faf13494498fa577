"""Tracing and exporting a model that is on the accelerator: PyTorch gets a copy of it on the CPU.

Tools that trace a model's operations (`torch.jit.trace`, `torch.export`) or compile its code (`torch.jit.script`) need
tensors in this process. The result can be saved and inspected; it belongs to the copy, not to the model.
"""

from __future__ import annotations

import copy
import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.patching import Patches, PatchGroup


def install(patches: Patches) -> None:
    """Have PyTorch's exporters work on copies of models on the accelerator."""
    group = patches.group("What follows a model's operations, or compiles its code, has to find them in this process.")
    for holder, names in ((torch.jit, ("trace", "trace_module", "script")), (torch.export, ("export",))):
        for name in names:
            _redirect(group, holder, name)
    group.when_imported("torch.onnx", lambda module: _redirect(group, module, "export"))


def _redirect(group: PatchGroup, holder: ModuleType, name: str) -> None:
    @functools.wraps(getattr(holder, name))
    def export(model: Any, *args: Any, **kwargs: Any) -> Any:
        if looks_names_up and len(args) < 2:  # the second is `_frames_up`
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

    # `torch.jit.script` looks for the names that a class uses in the frame that called it: ours is one more.
    looks_names_up = "_frames_up" in inspect.signature(getattr(holder, name)).parameters
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
