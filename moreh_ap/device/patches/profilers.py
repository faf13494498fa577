"""Profilers of CUDA in a script: they see the script's own process, in which nothing runs on a GPU.

Decides what they record: operations and times of the process, as in a CPU run without the one line.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.autograd import profiler

from moreh_ap.patching import Patches, PatchGroup


class _Runtime:
    """What `torch.cuda.cudart()` answers where PyTorch was built without CUDA."""

    @staticmethod
    def cudaProfilerStart() -> int:
        return 0

    @staticmethod
    def cudaProfilerStop() -> int:
        return 0


def install(patches: Patches) -> None:
    """Have profilers record this process alone, and marks for a profiler that cannot be there do nothing."""
    _record_this_process(patches.group("Nothing runs on a GPU in the script's process."))
    if torch.version.cuda is not None:
        return
    group = patches.group("PyTorch without CUDA refuses the marks of CUDA's profilers.")
    group.replace(torch.cuda, "cudart", _cudart)
    for name in ("start", "stop"):
        group.replace(torch.cuda.profiler, name, _nothing)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        group.replace(torch.cuda.nvtx, name, _nothing)
    group.replace(profiler.emit_nvtx, "__enter__", _enter)
    group.replace(profiler.emit_nvtx, "__exit__", _exit)


def _record_this_process(group: PatchGroup) -> None:
    @functools.wraps(profiler.profile.__init__)
    def init(self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **rest: Any) -> None:
        if enabled and rest.get("with_stack"):
            # Its tracer follows every thread that has run Python, and crashes on threads that the engine has ended.
            warnings.warn("with_stack=True is left out beside the accelerator's own threads.", stacklevel=3)
            rest["with_stack"] = False
        original(self, enabled, use_device=None if use_device == "cuda" else use_device, **rest)

    original = group.replace(profiler.profile, "__init__", init, "Records the CPU alone, without stacks.")


def _nothing(*args: Any) -> int:
    """Does nothing; returns 0, the number of a range or of no error."""
    return 0


def _cudart() -> type[_Runtime]:
    """A runtime library of CUDA whose profiler starts and stops without effect."""
    return _Runtime


def _enter(self: Any) -> Any:
    """Does nothing."""
    return self


def _exit(self: Any, *raised: Any) -> bool:
    """Does nothing."""
    return False
