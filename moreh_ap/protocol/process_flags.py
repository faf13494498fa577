"""Flags of PyTorch that hold for a whole process and that a model's forward follows.

A script sets them where it runs (``torch.set_default_dtype``, ``torch.set_float32_matmul_precision``, `sdpa_kernel`);
workers have to have them too. Decides which they are. Must not know how they travel.

What was compiled by `torch.compile` runs as it is written in every process of ours. In the controller compiled code
would find no entries in tensors; in a worker it would have been made for other surroundings (torch function modes) than
those of the next call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.backends import cuda, cudnn

from moreh_ap.patching import Patches, PatchGroup

Flags = tuple[Any, ...]
"""A value for each flag, in a fixed order; None where PyTorch does not tell."""


class _Flag(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _of(holder: Any, name: str) -> _Flag:
    return _Flag(functools.partial(getattr, holder, name), functools.partial(setattr, holder, name))


def _warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value)


_FLAGS = (
    _Flag(torch.get_default_dtype, torch.set_default_dtype),
    # The older way to say it first: it says the newer one too, and cannot be asked once that one was used alone.
    _Flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _of(cuda.matmul, "fp32_precision"),
    _of(cudnn, "allow_tf32"),
    _of(cudnn, "benchmark"),
    _of(cudnn, "deterministic"),
    _Flag(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    _Flag(torch.is_deterministic_algorithms_warn_only_enabled, _warn_only),
    _Flag(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    _Flag(cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    _Flag(cuda.math_sdp_enabled, cuda.enable_math_sdp),
    _Flag(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
)


GETTERS = tuple(flag.get for flag in _FLAGS)
"""PyTorch's own functions, which tell the flags in order: what every call asks. One that raises is `process_flags`'."""


def process_flags() -> Flags:
    """Returns what is set in this process."""
    return tuple(map(_value_of, _FLAGS))


def set_process_flags(values: Flags) -> None:
    """Sets what is set otherwise in this process."""
    for flag, value in zip(_FLAGS, values, strict=True):
        if value is not None and value != _value_of(flag):
            flag.set(value)


def _value_of(flag: _Flag) -> Any:
    try:
        return flag.get()
    except RuntimeError:  # precision was set in two ways that contradict each other
        return None


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that `torch.compile` was given, where a function is what that returned."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def run_as_written(group: PatchGroup) -> None:
    """Makes PyTorch run compiled functions as they are written. Imports the compiler."""
    stance = torch.compiler.set_stance("force_eager")
    group.note(
        "torch.compiler.set_stance",
        "Runs what was compiled as it is written.",
        lambda: stance.__exit__(None, None, None),  # as at the end of a `with` block
    )


def install(patches: Patches) -> None:
    """Has compiled code run as it is written once a model brings the compiler along."""
    group = patches.group("Compiled code would be made for surroundings that the next call does not have.")
    group.when_imported("torch._dynamo", lambda _: run_as_written(group))
