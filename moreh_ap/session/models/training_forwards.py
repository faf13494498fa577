"""Forwards that run in the script: those that train, and those that draw for Pyro.

A forward that trains computes gradients and steps an optimizer itself, as the meta-learner of MAML does. One that draws
for Pyro speaks to handlers (a trace, a replay) that the script has entered, and no worker has. Decides which modules
have one; the other modules that it calls run on the workers. Must not know what is done with a module.
"""

from __future__ import annotations

import inspect

from torch import nn

_CALLS = {"backward", "step"}
_DRAWS = {"pyro", "sample"}


def trains_itself(module: nn.Module) -> bool:
    """Says whether the code of a module's forward has both ``loss.backward()`` and ``optimizer.step()``."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and _CALLS.issubset(code.co_names)


def draws_for_pyro(module: nn.Module) -> bool:
    """Says whether a module is one of Pyro's classes (a model, an automatic guide), or its forward has
    ``pyro.sample(...)``."""
    if any(base.__module__ == "pyro.nn.module" for base in type(module).__mro__):
        return True
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and _DRAWS.issubset(code.co_names)
