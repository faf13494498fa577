"""Gives `from transformers import AdamW` a meaning again, without importing transformers.

Decides when the name is given: right after transformers is imported, or now if that has happened already. A
transformers that has its own `AdamW` keeps it. Must not import transformers (this runs inside `import torch`).

[Note: AdamW before torch] A script whose first line is `from transformers import AdamW, AutoTokenizer` has not
imported torch when Python looks for `AdamW`. It works nevertheless: Python passes over a name it does not find,
resolves the rest of the list (any `Auto...` class imports torch, and torch calls us), and only then binds every name.
A list with no name that needs torch, such as `from transformers import AdamW` alone, needs `import torch` in front of
it.
Source: `importlib._bootstrap._handle_fromlist`, which ignores a missing submodule of a package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

from moreh_ap.import_hook import when_imported

_LIBRARY = "transformers"
_NAME = "AdamW"
_ADAMW_MODULE = "moreh_ap.integrations.adamw"


def install() -> Callable[[], None]:
    """Gives the name now if transformers is imported, otherwise right after its import.

    Returns:
        A function that undoes it.
    """
    withdraw = when_imported(_LIBRARY, _give_name)

    def undo() -> None:
        withdraw()
        module = sys.modules.get(_LIBRARY)
        if module is not None:
            _take_name(module)

    return undo


class _LookUp:
    """A `__getattr__` for the class of a module that looks its names up late, with one name more.

    [Note: transformers replaces itself] The module that `import transformers` gives is an object of a class of its
    own, and whenever its `processing_utils` is imported the library makes another one and puts that in place of the
    first. A name set on one object would be lost with it, so the class is what gets the name.
    """

    def __init__(self, original: Callable[[Any, str], Any]) -> None:
        self.original = original

    def __get__(self, module: ModuleType | None, owner: type) -> Any:
        return self if module is None else MethodType(self, module)

    def __call__(self, module: ModuleType, name: str) -> Any:
        if name == _NAME and module.__name__ == _LIBRARY:
            return _import_adamw()
        return self.original(module, name)


def _give_name(module: ModuleType) -> None:
    """Gives the module the old class, unless it offers one itself."""
    if _NAME in getattr(module, "__all__", ()) or _NAME in vars(module):
        return
    look_up = vars(type(module)).get("__getattr__")
    if look_up is None:
        setattr(module, _NAME, _import_adamw())
    elif not isinstance(look_up, _LookUp):
        type(module).__getattr__ = _LookUp(look_up)  # type: ignore[method-assign]


def _take_name(module: ModuleType) -> None:
    """Undoes `_give_name`."""
    if getattr(vars(module).get(_NAME), "__module__", "") == _ADAMW_MODULE:
        delattr(module, _NAME)
    look_up = vars(type(module)).get("__getattr__")
    if isinstance(look_up, _LookUp):
        type(module).__getattr__ = look_up.original  # type: ignore[method-assign]


def _import_adamw() -> type:
    from moreh_ap.integrations.adamw import AdamW

    return AdamW
