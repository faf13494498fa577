"""What a compiler is given of a block: a function that it can follow to the end.

Decides how recomputation looks from inside a graph. Must not know what becomes of graphs.

[Note: classes of the script]
A class that a script defines comes to a worker by value. Its methods have a dict of globals that no module has, while
their name for it, `__main__`, is another module here. PyTorch's compiler looks up globals of what it inlines by such
names, except where they are those of the function that it began with. So it begins with a function whose globals are
those of the script's classes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moreh_ap.parallelizer.data.selective_recompute import KEPT
from moreh_ap.protocol.process_flags import uncompiled


def traced_forward(block: nn.Module, recomputed: str) -> Callable[..., Any]:
    """Returns the forward of a block's class, with the block as its first argument, for a compiler.

    Args:
        block: The block.
        recomputed: What of it is computed again in the backward, as a plan spells it.
    """
    function = defined_forward(block)
    if recomputed == "none":

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return function(block, *args, **kwargs)

    else:
        how: dict[str, Any] = {"use_reentrant": False}
        if recomputed == "selective":
            how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, sorted(KEPT, key=str))
        has_gradients, again = torch.is_grad_enabled, checkpoint

        def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not has_gradients():
                return function(block, *args, **kwargs)
            return again(function, block, *args, **how, **kwargs)

    code = forward.__code__.replace(
        co_name=f"forward_of_{type(block).__name__}"
    )  # a code of its own has its own graphs
    return FunctionType(code, _globals_of(block, function), closure=forward.__closure__)


def defined_forward(block: nn.Module) -> Callable[..., Any]:
    """Returns the forward of a block's class, without a decorator `torch.compile`."""
    return uncompiled(type(block).forward)


def _globals_of(block: nn.Module, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the globals of the script's classes in a block, if there are any; else those of its forward."""
    for submodule in block.modules():
        found = getattr(defined_forward(submodule), "__globals__", {})
        module = sys.modules.get(found.get("__name__", ""))
        if module is not None and vars(module) is not found:
            return found
    return getattr(function, "__globals__", globals())
