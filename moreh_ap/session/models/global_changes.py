"""Global variables of the script that a model on the workers reads, and those that it changes.

Decides when the workers are told of a value, and of which variable the script is warned. Which variables there are is
for `protocol/script_code/script_globals.py` to know.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

from moreh_ap.protocol.script_code.script_globals import GlobalName, form_of, read_by, written_by
from moreh_ap.session import script_line


class GlobalChanges:
    """Compares global variables with what the workers have.

    They got those of the script itself with the model; modules that it imports they have imported too, with the values
    that the variables had at first.

    Args:
        root: The model, as it is sent.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known: dict[tuple[int, str], tuple[GlobalName, Hashable]] = {}
        for variable, form in read_by(root):
            sent = form if variable.namespace.get("__name__") == "__main__" else None
            self._known[id(variable.namespace), variable.name] = variable, sent

    def __bool__(self) -> bool:
        return bool(self._known)

    def take(self) -> list[tuple[str, str, Any]]:
        """Returns path, name and value of each variable that changed since the last time."""
        changes = []
        for key, (variable, before) in self._known.items():
            value = variable.namespace.get(variable.name)
            form = form_of(value)
            if form != before and form is not None:
                self._known[key] = variable, form
                changes.append((variable.path, variable.name, value))
        return changes


def warn_of_writes(root: nn.Module) -> None:
    """Warns of global variables that forwards of `root` change, once for all: they change in the workers alone."""
    writes = list(written_by(root))
    names = sorted({write.name for write in writes})
    if names:
        code = writes[0].function.__code__
        script_line.warn(
            f"{writes[0].function.__qualname__} (line {code.co_firstlineno} of {code.co_filename}) changes the global "
            f"variable{'s' if len(names) > 1 else ''} {', '.join(names)} in the workers; in the script it stays. "
            "Return the value from forward(), keep it as an attribute of the module, or collect it in a hook. "
            "See: docs/limits.md#models"
        )
