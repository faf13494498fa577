"""Optimizer steps and gradient clipping, which the workers take where they have all parameters."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.backend import WorkerBackend
from moreh_ap.patching import Patches, PatchGroup


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have the workers take the steps of their optimizers and clip their gradients."""
    group = patches.group("Parameters, gradients and the state of optimizers are on the workers.")
    for cls in backend.optimizer_classes():
        _redirect_step(group, backend, cls)
    _redirect_clipping(group, backend)


def _redirect_step(group: PatchGroup, backend: WorkerBackend, cls: type[torch.optim.Optimizer]) -> None:
    original = cls.step

    @functools.wraps(original)
    def step(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        result = backend.step_optimizer(optimizer, closure)
        return original(optimizer, closure) if result is NotImplemented else result

    if hasattr(original, "hooked"):
        step.hooked = original.hooked  # type: ignore[attr-defined]
    group.replace(cls, "step", step, "Takes the step on the workers.")


def _redirect_clipping(group: PatchGroup, backend: WorkerBackend) -> None:
    # `clip_grad_norm_` is imported by name everywhere, so its two halves are redirected: it looks them up when called.
    module: types.ModuleType = sys.modules["torch.nn.utils.clip_grad"]

    def get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Has the workers compute the norm of gradients that they have."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm: Tensor = backend.total_norm(tensors, *args, **kwargs)
        return original_norm(tensors, *args, **kwargs) if norm is NotImplemented else norm

    def clip_grads_with_norm(parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
        """Has the workers scale gradients that they have."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if backend.clip_gradients(parameters, max_norm, total_norm) is NotImplemented:
            original_clip(parameters, max_norm, total_norm, *args, **kwargs)

    original_norm = group.replace(module, "_get_total_norm", get_total_norm)
    original_clip = group.replace(module, "_clip_grads_with_norm_", clip_grads_with_norm)
