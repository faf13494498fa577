"""Gives `from transformers import AdamW` a meaning again, without importing transformers.

Decides when the name is added: right after transformers is first imported, or now if that has happened already. A
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
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_LIBRARY = "transformers"
_NAME = "AdamW"


def install() -> None:
    """Adds the name now if transformers is imported, otherwise as soon as it is. Calling it again changes nothing."""
    module = sys.modules.get(_LIBRARY)
    if module is not None:
        _add_name(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def remove() -> None:
    """Undoes `install`."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    module = sys.modules.get(_LIBRARY)
    if module is not None and getattr(vars(module).get(_NAME), "__module__", "").startswith("moreh_ap."):
        delattr(module, _NAME)


class _AfterImport(MetaPathFinder):
    """Finds transformers as the other finders do, and adds the name when its import is done.

    Others look for the library without importing it (`importlib.util.find_spec`), and an import can fail: the finder
    stays until one has succeeded.
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
                    self._run_after_loading(spec.loader)
                return spec
        return None

    def _run_after_loading(self, loader: Loader) -> None:
        """Makes this one loader add the name after it has run the module; the loader's class stays as it is."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            run_module(module)
            remove()
            _add_name(sys.modules[_LIBRARY])  # transformers puts another object in its place while it runs

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _add_name(module: ModuleType) -> None:
    """Gives the module the old class, unless it offers one itself."""
    if _NAME in getattr(module, "__all__", ()) or _NAME in vars(module):
        return
    from moreh_ap.integrations.adamw import AdamW

    setattr(module, _NAME, AdamW)
