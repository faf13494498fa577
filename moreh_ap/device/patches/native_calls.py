"""Functions of PyTorch that no function mode sees, given host tensors: what they return is on the accelerator, too.

Decides by the arguments. Must not know why a tensor is a host tensor (`device/host_tensors.py`). Transforms of
functions are changed at the line, since scripts and libraries keep them under names of their own; the rest once there
is a host tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import checkpoint
from torch.utils.hooks import BackwardHook

from moreh_ap.device.host_tensors import has_host_tensor, mark_all
from moreh_ap.patching import Patches

_TRANSFORMS = ("grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian", "linearize")
_EFFECT = "Gives results the place of the arguments."
_REASON = "A tensor of this process that is on the accelerator has a class, which PyTorch's C++ drops."


def install_transforms(patches: Patches) -> None:
    """Have results of transformed functions be on the accelerator where their arguments are."""
    group = patches.group(_REASON)
    for name in _TRANSFORMS:
        group.replace(torch.func, name, _transform(getattr(torch.func, name)), _EFFECT)
    # What vectorized functions call, also those of libraries that were imported before.
    group.replace(torch._functorch.apis, "vmap_impl", _marking(torch._functorch.apis.vmap_impl), _EFFECT)


def install(patches: Patches) -> None:
    """Have results of the other functions that no mode sees be on the accelerator where their arguments are."""
    group = patches.group(_REASON)
    group.replace(forward_ad, "make_dual", _marking(forward_ad.make_dual), _EFFECT)
    group.replace(forward_ad, "unpack_dual", _marking(forward_ad.unpack_dual), _EFFECT)
    variable = type(torch.autograd.Variable)  # the class stays: scripts ask for it with `isinstance`
    group.replace(variable, "__call__", _marking(type.__call__), _EFFECT)
    group.replace(torch.jit.ScriptFunction, "__call__", _marking(torch.jit.ScriptFunction.__call__), _EFFECT)
    function = torch.autograd.Function
    group.replace(function, "apply", classmethod(_marking(function.apply.__func__)), _EFFECT)  # type: ignore[attr-defined]
    setup = _giving_hooks_their_place(BackwardHook.setup_output_hook)
    group.replace(BackwardHook, "setup_output_hook", setup, "Gives gradients the place of the module's result.")
    group.put(
        checkpoint._allowed_determinism_checks_to_fns,
        checkpoint._DEFAULT_DETERMINISM_MODE,
        _shape_and_dtype,
        "torch.utils.checkpoint._allowed_determinism_checks_to_fns",
        "Does not compare devices: those of a computation on ordinary tensors are the CPU.",
    )


def _giving_hooks_their_place(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what puts full backward hooks on a module's result; autograd gives them ordinary tensors."""

    @functools.wraps(original)
    def setup(self: BackwardHook, result: Any) -> Any:
        if has_host_tensor(result):
            self.user_hooks = [_given_host_tensors(hook) for hook in self.user_hooks]
            self.user_pre_hooks = [_given_host_tensors(hook) for hook in self.user_pre_hooks]
        return original(self, result)

    return setup


def _given_host_tensors(hook: Callable[..., Any]) -> Callable[..., Any]:
    return lambda module, *gradients: hook(module, *mark_all(gradients))


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose results are host tensors if an argument is one."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        is_host = torch._C._functorch.peek_interpreter_stack() is None and has_host_tensor((args, kwargs))
        return mark_all(result) if is_host else result

    return call


def _transform(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a transform of functions that marks what these functions return, and what it returns itself."""

    @functools.wraps(original)
    def transform(func: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(func, *args, **kwargs)
        if callable(made):
            return _marking(made)
        is_host = torch._C._functorch.peek_interpreter_stack() is None and has_host_tensor((args, kwargs))
        if not is_host:
            return made
        made = tuple(_marking_always(one) if callable(one) and not isinstance(one, Tensor) else one for one in made)
        return mark_all(made)

    return transform


def _marking_always(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function (of `vjp`) whose results are host tensors."""
    return functools.wraps(original)(lambda *args, **kwargs: mark_all(original(*args, **kwargs)))


def _shape_and_dtype(tensor: Tensor) -> dict[str, Any]:
    return {"shape": tensor.shape, "dtype": tensor.dtype}
