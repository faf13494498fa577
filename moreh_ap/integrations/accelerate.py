"""Accelerate: a model that it prepared for mixed precision travels to the workers.

Accelerate wraps the forward of such a model in an object that refuses to be pickled, so that no script saves it by
accident. The object holds one function, and is pickled here as that function. Must not import accelerate before the
script does.
"""

from __future__ import annotations

import copyreg
from types import ModuleType
from typing import Any

from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have the wrapper pickled, now or when the script imports accelerate."""
    group = patches.group("A model travels to the workers pickled, with the forward that Accelerate gave it.")

    def teach(operations: ModuleType) -> None:
        wrapper = operations.ConvertOutputsToFp32
        effect = "Pickles the wrapper of Accelerate around a forward."
        group.put(copyreg.dispatch_table, wrapper, _reduce, "copyreg.dispatch_table", effect)

    group.when_imported("accelerate.utils.operations", teach)


def _reduce(wrapper: Any) -> tuple[type, tuple[Any]]:
    return type(wrapper), (wrapper.model_forward,)
