"""The call site of a function in a forward: a hash of the call stack, equal in every process.

Decides which frames of the stack count. Must not know which function is called.
"""

from __future__ import annotations

import sys
import zlib
from types import CodeType

FORWARD = "moreh_ap.parallelizer.call.forward"
"""The module that calls the model: what leads there is left out."""

GATHERING = "torch.distributed"
"""The package whose code gathers parameters (FSDP2), in some forwards and not in others: no step of a forward."""

_PASSING_ON = {"torch.overrides", "torch.nn.modules.module", "torch.utils.checkpoint"}
"""Modules whose functions only call what they are given, in more ways than one: with hooks, with gradients. So do
PyTorch's private ones."""
_NAMES: dict[CodeType, int] = {}


def site_of_call() -> int:
    """Returns a number from 1 to 2^32 for the place in the model's code that is being executed, and what called it."""
    found, inner = 0, None
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == FORWARD:
            break
        package, place = module.partition(".")[0], (frame.f_code, frame.f_lasti)
        # A function of PyTorch is entered once more for each torch function mode that passes it on.
        is_passed_on = module in _PASSING_ON or (package == "torch" and ("._" in module or place == inner))
        if package != "moreh_ap" and not is_passed_on:
            found = zlib.crc32(f"{found} {_name_of(frame.f_code)} {frame.f_lasti}".encode())
            inner = place
        frame = frame.f_back  # type: ignore[assignment]
    return found or 1


def is_called_by(package: str) -> bool:
    """Returns whether the torch function that is being called comes from a package of PyTorch, not from the model."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if f"{module}.".startswith(f"{package}."):
            return True
        if module.partition(".")[0] not in ("torch", "moreh_ap"):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


def is_called_here() -> bool:
    """Returns whether the torch function that a mode gets is called by this package itself, not by the model through
    modes of the package that pass it on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_globals.get("__name__") == "torch.overrides"
    ):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("moreh_ap.")


def is_in_function_of_script() -> bool:
    """Returns whether a torch function is called in the forward of a `torch.autograd.Function` of the script."""
    frame = sys._getframe(1)
    while frame is not None and (module := frame.f_globals.get("__name__", "")) != FORWARD:
        if module == "torch.autograd.function" and frame.f_code.co_name == "apply":
            origin = str(getattr(frame.f_locals.get("cls"), "__module__", ""))
            return origin.partition(".")[0] not in ("torch", "moreh_ap")
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _name_of(code: CodeType) -> int:
    """Returns a number for a function: its name and line, since its file may lie elsewhere for another process."""
    name = _NAMES.get(code)
    if name is None:
        name = _NAMES[code] = zlib.crc32(f"{code.co_name} {code.co_firstlineno}".encode())
    return name
