"""Forwards that train: they compute gradients and step an optimizer themselves, as the meta-learner of MAML does.

Decides which modules have one; such a forward runs in the script, and the modules that it calls on the workers. Must
not know what is done with a module.
"""

from __future__ import annotations

import inspect

from torch import nn

_CALLS = {"backward", "step"}


def trains_itself(module: nn.Module) -> bool:
    """Says whether the code of a module's forward has both ``loss.backward()`` and ``optimizer.step()``."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    return code is not None and _CALLS.issubset(code.co_names)
