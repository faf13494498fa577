"""Calls back when a module is imported, without importing it.

Costs nothing until then: one finder at the head of `sys.meta_path` that compares a name, gone once it has served.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, callback: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Calls ``callback(module)`` now if module `name` is imported, otherwise right after its import.

    Returns:
        A function that takes the request back.
    """
    module = imported(name)
    if module is not None:
        callback(module)
        return lambda: None
    finder = _AfterImport(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.withdraw


def when_import_begins(name: str, callback: Callable[[], object]) -> Callable[[], None]:
    """Calls ``callback()`` now if the import of module `name` has begun, otherwise when it begins.

    Returns:
        A function that takes the request back.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    finder = _BeforeImport(name, lambda _: callback())
    sys.meta_path.insert(0, finder)
    return finder.withdraw


def imported(name: str) -> ModuleType | None:
    """Module `name` if its import is done, otherwise None."""
    module = sys.modules.get(name)
    is_under_way = getattr(getattr(module, "__spec__", None), "_initializing", False)
    return None if is_under_way else module


class _AfterImport(MetaPathFinder):
    """Finds one module as the other finders do, and calls back when its import is done.

    It stays until an import has succeeded: others look for a module without importing it (`importlib.util.find_spec`),
    and an import can fail and be tried again.
    """

    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self._name, self._callback = name, callback

    def withdraw(self) -> None:
        """Stop waiting for the module."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._run_after_loading(spec.loader)
                return spec
        return None

    def _run_after_loading(self, loader: Loader) -> None:
        """Makes this one loader call back after it has run the module; the loader's class stays as it is."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # gone already where two of us wait for the module
            self._run(run_module, module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _run(self, run_module: Callable[[ModuleType], object], module: ModuleType) -> None:
        run_module(module)
        self.withdraw()
        self._callback(sys.modules[self._name])  # a module may put another object in its place while it runs


class _BeforeImport(_AfterImport):
    """Calls back when the module begins to run."""

    def _run(self, run_module: Callable[[ModuleType], object], module: ModuleType) -> None:
        self.withdraw()
        self._callback(module)
        run_module(module)
