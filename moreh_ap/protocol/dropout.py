"""Whether a module draws random numbers for dropout.

Decides it from the module alone, before any forward. Must not know which stream they are drawn from.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def draws_random_numbers(module: nn.Module) -> Callable[[], bool]:
    """Returns what says whether a module drops anything in the mode it is in when asked.

    A dropout is a module of that name with its `p`, or a number in an attribute whose name has "drop" in it.
    """
    submodules = list(module.modules())

    def drops() -> bool:
        return module.training and any(_drops(submodule) for submodule in submodules)

    return drops


def _drops(submodule: nn.Module) -> bool:
    if "Dropout" in type(submodule).__name__:
        return getattr(submodule, "p", 0) > 0
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(submodule).items())
