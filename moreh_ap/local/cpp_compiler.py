"""Which C++ compiler PyTorch's compiler would use on this machine.

Decides by the environment, as PyTorch does. Must not know what is compiled.
"""

from __future__ import annotations

import os
import shutil


def missing() -> str:
    """Returns the name of the C++ compiler that is not there; "" if one is."""
    compiler = os.environ.get("CXX", "g++")
    return compiler if shutil.which(compiler) is None else ""
