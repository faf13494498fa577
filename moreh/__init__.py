"""The name that scripts written for the platform import; the same object as `torch.moreh`.

Decides that a broken installation never breaks `import torch`: the entry point is here, in a module that imports only
torch, and every failure behind it becomes a warning. Must not know anything about `moreh_ap` but its two doors.
"""

from __future__ import annotations

import functools
import sys
import warnings
from types import ModuleType

__all__ = ["option"]


def __getattr__(name: str) -> ModuleType:
    """Returns `moreh.option`, imported when first asked for."""
    if name == "option":
        import importlib

        return importlib.import_module("moreh.option")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _autoload() -> None:
    """Entry point of the group `torch.backends`: PyTorch calls it at the end of `import torch`. Works once."""
    try:
        from moreh_ap import _autoload as autoload

        autoload()
    except Exception as error:
        text = f"torch.moreh is not available: {type(error).__name__}: {error}"
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors in this process, but `import torch` must go on
            print(text, file=sys.stderr)


import torch  # noqa: E402,F401  # unfinished when the entry point brought us here, which is enough

_autoload()  # for processes that switched the entry points off; otherwise it has run or runs now
