"""Which modules workers import early: those of libraries that the script imports, when it does.

Decides which of them are named to a warm parent at once, and which later. Must not know how it is told.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from moreh_ap.import_hook import when_import_begins


def is_needed(module: str) -> bool:
    """Returns whether workers should import a module early: the script imports its library, or Python brings it."""
    return _library(module) in sys.modules or _library(module) in sys.stdlib_module_names


def _library(module: str) -> str:
    return module.partition(".")[0]


class EarlyImports:
    """Modules for a warm parent.

    Args:
        modules: All that workers may need.
        tell: Called with each one of a library that the script has not imported, when it begins to.

    Attributes:
        now: Those that are needed by now.
    """

    def __init__(self, modules: Sequence[str], tell: Callable[[str], object]) -> None:
        self.now = tuple(filter(is_needed, modules))
        self._later = [module for module in modules if module not in self.now]
        self._tell = tell
        self._withdraw: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Tells from now on."""
        self._withdraw = [
            when_import_begins(_library(module), functools.partial(self._tell, module)) for module in self._later
        ]

    def stop(self) -> None:
        """Tells no longer: the warm parent is ready, or gone."""
        for withdraw in self._withdraw:
            withdraw()
