"""Where in a forward a function is called: told by all lines that lead there, the same in every process.

Decides what tells one place from another. Must not know what happens there.
"""

from __future__ import annotations

import sys
import zlib
from types import CodeType

FORWARD = "moreh_ap.parallelizer.call.forward"
"""The module that calls the model: what leads there is left out."""

_NAMES: dict[CodeType, int] = {}


def site_of_call() -> int:
    """Returns a number from 1 to 2^32 for the place in the model's code that is being executed, and what called it."""
    found = 0
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == FORWARD:
            break
        if module.partition(".")[0] != "moreh_ap":
            found = zlib.crc32(f"{found} {_name_of(frame.f_code)} {frame.f_lasti}".encode())
        frame = frame.f_back  # type: ignore[assignment]
    return found or 1


def _name_of(code: CodeType) -> int:
    """Returns a number for a function: its name and line, since its file may lie elsewhere for another process."""
    name = _NAMES.get(code)
    if name is None:
        name = _NAMES[code] = zlib.crc32(f"{code.co_name} {code.co_firstlineno}".encode())
    return name
