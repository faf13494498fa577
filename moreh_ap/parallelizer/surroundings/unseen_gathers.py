"""Keeps what FSDP2 does with parameters around a forward out of the sight of the forward's torch function modes.

Decides which of its functions run without them. Must not know what modes there are, or what they do.

[Note: not the forward's]
A function mode is called for everything that Python does with a tensor. FSDP2 does as much as a block itself before and
after it, in Python: of the 2,600 calls in the forward of a GPT-2 of 12 blocks that computes in bfloat16, 1,700 were for
gathering weights. No mode has anything to do there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from moreh_ap.parallelizer.data.recompute import function_modes
from moreh_ap.patching import Patches

_FUNCTIONS = ("unshard", "wait_for_unshard", "reshard")


def install(patches: Patches) -> None:
    """Has FSDP2 gather and free parameters without function modes. See [Note: not the forward's]."""
    group = patches.group("What FSDP2 does with parameters around a forward is no part of it.")
    for name in _FUNCTIONS:
        unseen = _without_modes(getattr(FSDPParamGroup, name))
        group.replace(FSDPParamGroup, name, unseen, "Runs without the torch function modes of a forward.")


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with function_modes(()):
            return function(*args, **kwargs)

    return run
