"""Profilers of CUDA in a script: they see the script's own process, in which nothing runs on a GPU.

Decides what they find there: operations and times of the process, as a run without the one line on the CPU does.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.autograd import profiler

from moreh_ap.device.patches.registry import Patches


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
    _record_this_process(patches)
    if torch.version.cuda is not None:
        return
    patches.replace(torch.cuda, "cudart", lambda: _Runtime)
    for name in ("start", "stop"):
        patches.replace(torch.cuda.profiler, name, _nothing)
    for name in ("range_push", "range_pop", "range_start", "range_end", "mark"):
        patches.replace(torch.cuda.nvtx, name, _nothing)
    patches.replace(profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.replace(profiler.emit_nvtx, "__exit__", lambda self, *raised: False)


def _record_this_process(patches: Patches) -> None:
    @functools.wraps(profiler.profile.__init__)
    def init(self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **rest: Any) -> None:
        if enabled and rest.get("with_stack"):
            # Its tracer follows every thread that has run Python, and crashes over those that the engine has ended.
            warnings.warn("with_stack=True is left out beside the accelerator's own threads.", stacklevel=3)
            rest["with_stack"] = False
        original(self, enabled, use_device=None if use_device == "cuda" else use_device, **rest)

    original = patches.replace(profiler.profile, "__init__", init)


def _nothing(*args: Any) -> int:
    """Stands in for functions that return a number: of a range, or that of no error."""
    return 0
