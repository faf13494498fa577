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
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MethodType, ModuleType
from typing import Any

_LIBRARY = "transformers"
_NAME = "AdamW"
_ADAMW_MODULE = "moreh_ap.integrations.adamw"


def install() -> None:
    """Gives the name now if transformers is imported, and whenever it is imported. Calling it again changes nothing."""
    module = sys.modules.get(_LIBRARY)
    if module is not None:
        _give_name(module)
    if not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def remove() -> None:
    """Undoes `install`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    module = sys.modules.get(_LIBRARY)
    if module is None:
        return
    if getattr(vars(module).get(_NAME), "__module__", "") == _ADAMW_MODULE:
        delattr(module, _NAME)
    look_up = vars(type(module)).get("__getattr__")
    if isinstance(look_up, _LookUp):
        type(module).__getattr__ = look_up.original  # type: ignore[method-assign]


class _AfterImport(MetaPathFinder):
    """Finds transformers as the other finders do, and gives the name when its import is done.

    It stays: others look for the library without importing it (`importlib.util.find_spec`), an import can fail, and a
    module can be reloaded.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LIBRARY:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _run_after_loading(spec.loader)
                return spec
        return None


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


def _run_after_loading(loader: Loader) -> None:
    """Makes this one loader give the name after it has run the module; the loader's class stays as it is."""
    run_module = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        run_module(module)
        _give_name(sys.modules[_LIBRARY])

    loader.exec_module = exec_module  # type: ignore[method-assign]


def _give_name(module: ModuleType) -> None:
    """Gives the module the old class, unless it offers one itself."""
    if _NAME in getattr(module, "__all__", ()) or _NAME in vars(module):
        return
    look_up = vars(type(module)).get("__getattr__")
    if look_up is None:
        setattr(module, _NAME, _import_adamw())
    elif not isinstance(look_up, _LookUp):
        type(module).__getattr__ = _LookUp(look_up)  # type: ignore[method-assign]


def _import_adamw() -> type:
    from moreh_ap.integrations.adamw import AdamW

    return AdamW
