"""Lets a forward's surroundings see each call of a module in it.

Decides how that is done for the time of one forward. Must not know what for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from moreh_ap.patching import Patches

Original = Callable[..., Any]
"""The original call of the module, with its hooks."""
OnModule = Callable[[Original, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Gets the original call, the module and its arguments; returns the result."""


@contextmanager
def seeing_modules(on_module: OnModule) -> Iterator[None]:
    """Inside, every call of a module in this process goes through `on_module`."""
    patches = Patches()

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Shows the call of a module to the forward's surroundings."""
        return on_module(functools.partial(before, self), self, args, kwargs)

    before = patches.group("Rows of a batch meet in some modules and not in others.").replace(
        nn.Module, "__call__", __call__
    )
    try:
        yield
    finally:
        patches.undo()


OF_MODULES = "module "
"""With what steps begin that are calls of modules."""


def module_step(module: nn.Module) -> str:
    """Returns what a call of the module is called among the steps of a forward."""
    return f"{OF_MODULES}{type(module).__name__}"
