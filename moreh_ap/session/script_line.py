"""Warnings that name the script's line."""

from __future__ import annotations

import sys
import warnings

from moreh_ap.protocol.module_attributes import LIBRARIES

_NOT_THE_SCRIPT = frozenset({*LIBRARIES, "trl"})


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of libraries, or at the outermost line if all are in libraries."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals.get("__name__", "")) in _NOT_THE_SCRIPT:
        frame = frame.f_back
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno)


def _package(module: str) -> str:
    return module.split(".", 1)[0]
