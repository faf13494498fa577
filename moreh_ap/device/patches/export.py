"""Tracing, compiling and exporting a model that is on the accelerator: PyTorch gets a copy of it on the CPU.

What follows the operations of a model (`torch.jit.trace`, `torch.export`) or compiles its code for tensors with memory
(`torch.jit.script`) has to find them in this process. The result is for saving and looking at, as it is of a copy.
"""

from __future__ import annotations

import copy
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.integrations.import_hook import when_imported

if TYPE_CHECKING:
    from moreh_ap.device.patches.install import Patches


def install(patches: Patches) -> None:
    """Have PyTorch's exporters work on copies of models on the accelerator."""
    for holder, names in ((torch.jit, ("trace", "trace_module", "script")), (torch.export, ("export",))):
        for name in names:
            _redirect(patches, holder, name)
    patches.on_undo(when_imported("torch.onnx", lambda module: _redirect(patches, module, "export")))


def _redirect(patches: Patches, holder: ModuleType, name: str) -> None:
    @functools.wraps(getattr(holder, name))
    def export(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_on_accelerator(model):
            return original(model, *args, **kwargs)
        args, kwargs = tree_map_only(VirtualTensor, VirtualTensor.to_host, (args, kwargs))
        copied = _copy_on_host(model)
        exported = original(copied, *args, **kwargs)
        if any(part.training for part in model.modules()):  # what is traced runs, and changes running averages
            _take_buffers(model, copied)
        return exported

    original = patches.replace(holder, name, export)


def _is_on_accelerator(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(
        isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in model.parameters()
    )


def _copy_on_host(model: nn.Module) -> nn.Module:
    copied: dict[int, Any] = {}
    for part in model.modules():
        for value in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
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
