"""Accelerate: a model that it prepared for mixed precision travels to the workers.

Accelerate wraps the forward of such a model in an object that refuses to be pickled, so that nobody saves it by
accident. It is made of a function alone, and here is told how. Must not import accelerate before the script does.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import ModuleType
from typing import Any

from moreh_ap.import_hook import when_imported


def install(on_undo: Callable[[Callable[[], None]], None]) -> None:
    """Have the wrapper pickled, now or when the script imports accelerate.

    Args:
        on_undo: Registers an action for the undoing.
    """

    def teach(operations: ModuleType) -> None:
        wrapper = operations.ConvertOutputsToFp32
        copyreg.pickle(wrapper, _reduce)

        def forget() -> None:
            copyreg.dispatch_table.pop(wrapper, None)

        on_undo(forget)

    on_undo(when_imported("accelerate.utils.operations", teach))


def _reduce(wrapper: Any) -> tuple[type, tuple[Any]]:
    return type(wrapper), (wrapper.model_forward,)
