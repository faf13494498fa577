"""Optimizer steps and gradient clipping, which the workers take where they have all parameters."""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.device.worker_backend import IN_FORCE, WorkerBackend
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches, PatchGroup

SCRIPT_STEP = "script_step"
"""The attribute in which a class's `step`, once PyTorch has hooks around it, has the function as it was written."""

_NEEDS_MEMORY = {"apex", "deepspeed", "transformer_engine"}
"""Libraries whose optimizers hand the addresses of parameters to code of their own for GPUs. (bitsandbytes, since 0.46,
registers its operations with PyTorch, as which they run.)"""


def install(patches: Patches, backend: WorkerBackend) -> None:
    """Have the workers take the steps of their optimizers, and clear and clip their gradients."""
    group = patches.group("Parameters, gradients and the state of optimizers are on the workers.")
    steps = []
    for cls in backend.optimizer_classes():
        written: Any = cls.step
        is_hooked = hasattr(written, "hooked")  # by an optimizer of this class from before the line
        step: Any = backend.step_on_workers(written.__wrapped__ if is_hooked else written)
        steps.append(step)
        if is_hooked:
            step = torch.optim.Optimizer.profile_hook_step(step)
            step.hooked = True
        group.replace(cls, "step", step, "Takes the step on the workers.")
    _redirect_own_steps(group, steps)
    clear = backend.zero_grad_on_workers(torch.optim.Optimizer.zero_grad)
    group.replace(torch.optim.Optimizer, "zero_grad", clear, "Has the workers clear gradients that they have.")

    def zero_grad(module: nn.Module, set_to_none: bool = True) -> None:
        """Has the workers clear all gradients of a module at once."""
        if set_to_none and backend.clear_gradients(list(module.parameters())):
            return
        with backend.clearing_gradients():
            original(module, set_to_none)

    original = group.replace(nn.Module, "zero_grad", zero_grad)
    _refuse_native_optimizers(group)
    _redirect_clipping(group, backend)
    _redirect_unscaling(group, backend)


def _redirect_own_steps(group: PatchGroup, steps: list[Any]) -> None:
    """Has optimizers of other classes ask, at each step, whether the workers take it.

    Args:
        group: What is replaced.
        steps: Those of classes that the workers know.
    """

    def profile_hook_step(func: Any) -> Any:
        """Has the class's `step` ask whether the workers take it."""
        if func in steps:
            return original(func)

        @functools.wraps(func)
        def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            backend = IN_FORCE.backend
            if backend is None:
                return func(optimizer, *args, **kwargs)
            return backend.step_of_own(optimizer, func, args, kwargs)

        setattr(step, SCRIPT_STEP, func)
        return original(step)

    effect = "Has the workers take the steps of other optimizers, where they can."
    original = group.replace(torch.optim.Optimizer, "profile_hook_step", staticmethod(profile_hook_step), effect)


def _refuse_native_optimizers(group: PatchGroup) -> None:
    @functools.wraps(torch.optim.Optimizer.__init__)
    def init(optimizer: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        original(optimizer, params, defaults)
        library = type(optimizer).__module__.partition(".")[0]
        if library in _NEEDS_MEMORY and any(
            isinstance(one, VirtualTensor) and one.is_cuda
            for group in optimizer.param_groups
            for one in group["params"]
        ):
            raise UnsupportedError(
                f"{type(optimizer).__module__}.{type(optimizer).__name__} hands addresses of parameters to code for "
                "one GPU, and the parameters are on the workers.",
                allowed="Optimizers made of PyTorch's operations; torch.optim has kernels for whole lists as well.",
                fix="optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)",
                link="docs/gpu.md#errors",
            )

    effect = "Refuses optimizers that need the memory of parameters in this process."
    original = group.replace(torch.optim.Optimizer, "__init__", init, effect)


def _redirect_clipping(group: PatchGroup, backend: WorkerBackend) -> None:
    # `clip_grad_norm_` is imported by name everywhere, so the function that its decorator calls is replaced, in the
    # decorator's cell. Its two halves, which it looks up when called, are replaced for scripts that call them.
    module: types.ModuleType = sys.modules["torch.nn.utils.clip_grad"]
    cells = module.clip_grad_norm_.__closure__
    cell = next(cell for cell in cells if isinstance(cell.cell_contents, types.FunctionType))
    original_clip_by_norm = cell.cell_contents
    cell.cell_contents = backend.clip_on_workers(original_clip_by_norm)
    group.note(
        "torch.nn.utils.clip_grad.clip_grad_norm_",
        "Has the workers clip gradients that they have.",
        lambda: setattr(cell, "cell_contents", original_clip_by_norm),
    )

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


def _redirect_unscaling(group: PatchGroup, backend: WorkerBackend) -> None:
    def unscale_grads(
        scaler: Any, optimizer: torch.optim.Optimizer, inverse_scale: Tensor, found: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Has the workers unscale all gradients of an optimizer at once: PyTorch looks five times at each of them."""
        parameters = [one for listed in optimizer.param_groups for one in listed["params"]]
        if backend.unscale_gradients(parameters, found, inverse_scale):
            return {found.device: found}
        unscaled: dict[torch.device, Tensor] = original(scaler, optimizer, inverse_scale, found, allow_fp16)
        return unscaled

    original = group.replace(torch.amp.GradScaler, "_unscale_grads_", unscale_grads)
