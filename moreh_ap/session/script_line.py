"""The script's line at which something happens: for warnings that name it, and for traces."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from moreh_ap.protocol.module_attributes import LIBRARIES

_NOT_THE_SCRIPT = frozenset({*LIBRARIES, "trl", "contextlib"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of libraries, or at the outermost line if all are in libraries."""
    frame = _innermost(sys._getframe(1))
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno)


def place() -> str:
    """Returns that line as "train.py:14"."""
    frame = _innermost(sys._getframe(1))
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _innermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None and _package(frame.f_globals.get("__name__", "")) in _NOT_THE_SCRIPT:
        frame = frame.f_back
    return frame


def _package(module: str) -> str:
    return module.split(".", 1)[0]
