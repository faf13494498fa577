"""Files that the script's code writes in a worker, where every worker writes them, and trial runs do.

A hook writes nothing there: it runs once more where the script is, and writes then (`hook_records.py`, [Note: hooks run
twice]). What a forward writes is written, and noted for the script to be warned of. Seen are files that are opened by
Python, and `torch.save`. Decides which files count. Must not know who asks for them.

[Note: whose file]
A file is the forward's if a function of the script is on the stack around what opens it, nearer than a compiler and
nearer than this package. A call may bring a compiler along: of blocks, of a Triton kernel, of C++. A forward is inside
functions of this package, and what is farther out runs the worker: the engine, which looks like the script's own where
it was installed by hand.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from moreh_ap.patching import Patches
from moreh_ap.protocol.script_code.value_forms import is_of_script

_NOT_THE_SCRIPTS = ("__pycache__", ".cache", ".triton", "torchinductor", "triton_")
_COMPILERS = (
    *(f"torch.{name}" for name in ("_dynamo", "_inductor", "_functorch", "utils.cpp_extension")),
    *("triton", "cutlass", "numba"),
)
_OURS = "moreh_ap"
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_PATHS = (str, bytes, os.PathLike)

WRITTEN: dict[str, None] = {}
"""Files that forwards have written since the script was told, in their order."""


class _Dropping(threading.local):
    """Whether what this thread writes is dropped."""

    active = False


_DROPPING = _Dropping()


@contextlib.contextmanager
def writing_nothing() -> Iterator[None]:
    """Inside, files that are written are empty and nowhere, and folders stay as they are."""
    before, _DROPPING.active = _DROPPING.active, True
    try:
        yield
    finally:
        _DROPPING.active = before


def take_written() -> tuple[str, ...]:
    """Returns the files, and forgets them."""
    files = tuple(WRITTEN)
    WRITTEN.clear()
    return files


def install(patches: Patches) -> None:
    """Has files that the script's code writes in this process noted, or dropped."""
    group = patches.group(
        "Hooks run once more in the script, and forwards run in every worker: each would write files."
    )

    def open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Notes a file that a forward writes; of a hook, opens the null device instead."""
        if isinstance(file, _PATHS) and not _is_reading(mode):
            if _DROPPING.active:
                return original(os.devnull, mode.replace("x", "w"), *args, **kwargs)
            _note(file)
        return original(file, mode, *args, **kwargs)

    original = builtins.open
    group.replace(builtins, "open", open)
    group.replace(io, "open", open)

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Notes the file, if a forward saves; of a hook, saves nothing."""
        if isinstance(f, _PATHS):
            if _DROPPING.active:
                return
            _note(f)
        original_save(obj, f, *args, **kwargs)

    original_save = group.replace(torch, "save", save)
    for name in ("mkdir", "remove", "rename", "replace", "rmdir", "unlink"):
        group.replace(os, name, _unless_dropping(getattr(os, name)), "Of a hook, does nothing.")


def _unless_dropping(change: Callable[..., None]) -> Callable[..., None]:
    def changed(*args: Any, **kwargs: Any) -> None:
        if not _DROPPING.active:
            change(*args, **kwargs)

    return changed


def _is_reading(mode: Any) -> bool:
    return not (isinstance(mode, str) and set(mode) & set("wax+"))


def _note(file: Any) -> None:
    path = os.path.abspath(os.fsdecode(file))
    if not path.startswith(_NO_FILES) and not any(one in path for one in _NOT_THE_SCRIPTS) and _is_called_by_script():
        WRITTEN[f"a temporary file in {path}" if os.path.isdir(path) else path] = None


def _is_called_by_script() -> bool:
    """Returns whether a function of the script is on the stack; not the code of a Python module that is imported.

    See [Note: whose file].
    """
    frame: FrameType | None = sys._getframe(3)  # around `open`, `_note` and this one
    own_main = vars(sys.modules["__main__"])  # of this process; what the script's has, has come as functions
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _is_in(name, _COMPILERS) or _is_in(name, (_OURS,)):
            return False
        if frame.f_globals is not own_main and is_of_script(name):
            return frame.f_code.co_name != "<module>"
        frame = frame.f_back
    return False


def _is_in(name: str, packages: tuple[str, ...]) -> bool:
    """Returns whether a Python module is one of these packages, or in one."""
    return any(name == package or name.startswith(package + ".") for package in packages)
