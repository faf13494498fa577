"""Settings that a library keeps for its modules: objects in its Python modules whose attributes its functions set.

``with set_exploration_type(...)`` of TorchRL sets an attribute of such an object, and modules of the library ask it in
their forwards. Decides what counts as a setting. Must not know how a change travels.
"""

from __future__ import annotations

import dis
import enum
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moreh_ap.protocol.module_attributes import LIBRARIES
from moreh_ap.protocol.script_code.value_forms import is_of_script

_PLAIN = (bool, int, float, str, type(None), enum.Enum, torch.dtype)
_MAKING = {"__init__", "__new__", "__setstate__"}


def settings_of(root: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the namespaces and names (``_mode.value``) of settings in the Python modules of a model's classes.

    PyTorch's own and those of libraries that are known are left out: they are followed in other ways.
    """
    names = {kind.__module__ for module in root.modules() for kind in type(module).__mro__}
    for name in sorted(names):
        package = name.partition(".")[0]
        module = sys.modules.get(name)
        if module is None or package in (*LIBRARIES, "builtins", "abc", "typing") or is_of_script(name):
            continue
        for holder, value in list(vars(module).items()):
            kind: Any = type(value)
            is_own = kind.__module__.partition(".")[0] == package
            is_object = is_own and not isinstance(value, (type, nn.Module, enum.Enum))
            if is_object and isinstance(getattr(value, "__dict__", None), dict):
                for attribute in _attributes_set_by(kind):
                    if isinstance(vars(value).get(attribute, print), _PLAIN):
                        yield vars(module), f"{holder}.{attribute}"


@functools.cache
def _attributes_set_by(kind: type) -> tuple[str, ...]:
    """Returns which attributes methods of a class set in an object that is made already."""
    methods = [one for name, one in vars(kind).items() if name not in _MAKING and isinstance(one, types.FunctionType)]
    steps = (step for method in methods for step in dis.get_instructions(method))
    return tuple(dict.fromkeys(step.argval for step in steps if step.opname == "STORE_ATTR"))
