"""Forwards that a script or library has set on a module in place of its class's.

Decides whether such a function only wraps what was there. Must not know what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

_WRAPPERS = ("torch.", "transformers.", "accelerate.")
"""Whose functions around a forward (autocast, casts of its result, hooks) do not change what is computed in it."""


def has_another_forward(root: nn.Module) -> bool:
    """Says whether a module of the tree has another forward than its class."""
    return any(not _owner(function).startswith(_WRAPPERS) for function in own_forwards(root))


def own_forwards(root: nn.Module) -> Iterator[Any]:
    """Yields the functions that modules of the tree have for a forward in place of their class's, wrapped ones too."""
    for submodule in root.modules():
        forward = vars(submodule).get("forward")
        while forward is not None:
            function = getattr(forward, "func", getattr(forward, "__func__", forward))  # of a partial, of a method
            yield function
            forward = getattr(function, "__wrapped__", None)


def _owner(function: Any) -> str:
    """Returns the module in which a function is written, whatever it says of itself, with a dot behind."""
    written = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    return f"{written}."
