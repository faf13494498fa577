"""Variables outside of a model on the workers that it reads, and those that it changes.

Decides when a value is sent to the workers, and of which variable the script is warned. Which variables there are is
for `protocol/script_code/script_globals.py` to know, and `value_forms.py` what it is that changes.

[Note: large values]
To compare a value is to pickle it. What takes more than `_MAX_BYTES` is compared at the second call, the fourth, the
eighth and so on, and once it has changed, at every call. Then the workers get the value of now, and the script is told
that calls before may have had an old one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from moreh_ap.protocol.script_code.script_globals import CLOSURE, HOOK, Variable, read_by, written_by
from moreh_ap.protocol.script_code.value_forms import PickledForm, Same, form_of, is_stable, tensors_in
from moreh_ap.session import script_line

_MAX_BYTES = 64 * 1024


class GlobalChanges:
    """Compares variables with what the workers have.

    They got those of the script itself with the model; modules that it imports they have imported too, with the values
    that the variables had at first.

    Args:
        root: The model, as it is sent.
    """

    def __init__(self, root: nn.Module) -> None:
        own = {*root.modules()}
        variables = [variable for variable in read_by(root) if not _is_in(variable.value(), own)]
        # Functions that one function has made share a name, so that a worker could not tell which of them to change.
        places = Counter((variable.path, variable.name) for variable in variables)
        self._known = [_Known(one, is_one_of_several=places[one.path, one.name] > 1) for one in variables]

    def __bool__(self) -> bool:
        return bool(self._known)

    def take(self) -> list[tuple[str, str, Any]]:
        """Returns path, name and value of each variable that changed since the last time."""
        changed = [known for known in self._known if known.has_changed()]
        for known in changed:
            known.warn()
        return [
            (known.variable.path, known.variable.name, known.variable.value()) for known in changed if known.is_sent
        ]


class _Known:
    """A variable, and the form of the value that the workers have."""

    def __init__(self, variable: Variable, is_one_of_several: bool) -> None:
        self.variable = variable
        value = variable.value()
        self._is_on_device = isinstance(value, nn.Module) and _is_on_device(value)
        self.is_sent = not self._is_on_device and not (is_one_of_several and variable.path.startswith(CLOSURE))
        form = form_of(value)
        self._is_compared = is_stable(value, form)
        self._form: Hashable | None = form if self._is_compared else Same(value)
        self._is_large = isinstance(form, PickledForm) and form.num_bytes > _MAX_BYTES
        # Functions, and what cannot be pickled as a whole, a worker's import has made too.
        is_sent_first = form.is_whole if isinstance(form, PickledForm) else not isinstance(form, Same)
        if variable.is_imported and self._is_compared and is_sent_first and self.is_sent:
            self._form = None
        self._call = self._looked_at = 0
        self._is_late = self._warned = False

    def has_changed(self) -> bool:
        """Returns whether the value is another one than the workers'. See [Note: large values]."""
        self._call += 1
        if self._is_large and self._call < 2 * self._looked_at:
            return False
        num_calls, self._looked_at = self._call - self._looked_at, self._call
        value = self.variable.value()
        form = form_of(value) if self._is_compared else Same(value)
        if form == self._form:
            return False
        if self._form is not None:
            self._is_late, self._is_large = num_calls > 1, False
        self._form = form
        return True

    def warn(self) -> None:
        """Warns, once, if a change does not reach the workers, not in time, or not back."""
        name, instead = self.variable.name, "Make it an attribute of the model, or an argument of the call."
        text = ""
        if self._is_on_device:
            text = f"The module {name}, outside of the model, has changed: the workers have its first values."
        elif not self.is_sent:
            function = self.variable.path.rpartition(".")[2].partition(" ")[0]
            text = f"{name} has changed, which several functions named {function} read, each its own: the workers have "
            text += "their first values."
        elif self._is_late:
            text = (
                f"{name} is large, so that it is not compared at every call. It has changed: the workers get it now, "
            )
            text += "and at every call from now on; earlier calls may have had an older value."
        if text and not self._warned:
            self._warned = True
            script_line.warn(f"{text} {instead} See: docs/limits.md#models")


def warn_of_writes(root: nn.Module) -> None:
    """Warns, once for all, of variables that forwards of `root` change or would train: that is in the workers alone."""
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
    trained = [
        variable.name
        for variable in read_by(root)
        if not variable.path.startswith(HOOK) and any(map(_wants_gradient, tensors_in(variable.value())))
    ]
    if trained:
        script_line.warn(
            f"forward() reads {', '.join(sorted(trained))}, outside of the model, which requires a gradient: the "
            "workers compute with a copy, and it gets none. Register it as a parameter, or pass it to the call. "
            "See: docs/limits.md#models"
        )
    drawn_from = [one.name for one in read_by(root) if isinstance(one.value(), torch.Generator)]
    own = [(type(part).__name__, name, value) for part in root.modules() for name, value in vars(part).items()]
    drawn_from += [f"{kind}.{name}" for kind, name, value in own if isinstance(value, torch.Generator)]
    if drawn_from:
        script_line.warn(
            f"forward() reads {', '.join(sorted(drawn_from))}, a random number generator of its own: the workers draw "
            "from copies of it, and the script's stays in its state. Draw before the call, or from the accelerator's "
            "own stream. See: docs/limits.md#models"
        )


def _is_on_device(module: nn.Module) -> bool:
    """Returns whether a module has tensors on the accelerator, which are not sent as values."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(not tensor.is_cpu for tensor in (*module.parameters(), *module.buffers()))


def _is_in(value: Any, modules: set[nn.Module]) -> bool:
    """Returns whether a value is one of the modules, or has one of them."""
    return isinstance(value, nn.Module) and not modules.isdisjoint(value.modules())


def _wants_gradient(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad and tensor.is_leaf
