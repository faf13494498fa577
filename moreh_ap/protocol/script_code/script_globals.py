"""Global variables of the script that the forwards of a model use: which there are, and whether they have changed.

Decides which functions a forward may come to, which of the names they read can be compared from call to call, and which
they change. Must not know how changes travel.
"""

from __future__ import annotations

import argparse
import dataclasses
import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

PATH = "globals of "
"""Begins what stands for the path of a submodule in a change of a global variable; the name of its module follows."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_MAX_LENGTH, _MAX_DEPTH = 64, 4
_CHANGING = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "popitem",
    "remove",
    "clear",
    "appendleft",
}


class GlobalName(NamedTuple):
    """A global variable: the dictionary that holds it, and its name."""

    namespace: dict[str, Any]
    name: str

    @property
    def path(self) -> str:
        """What stands for the path of a submodule where it is changed as an attribute is."""
        return f"{PATH}{self.namespace.get('__name__', '')}"


class Write(NamedTuple):
    """A place where a function changes a global variable of the script."""

    name: str
    function: types.FunctionType


def functions_of(root: nn.Module) -> list[types.FunctionType]:
    """Returns the script's functions that a call of `root` may come to: its forwards and what these name."""
    modules = list(root.modules())
    methods: dict[str, list[types.FunctionType]] = {}
    for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
        for name, member in vars(kind).items() if _is_of_script(kind.__module__) else ():
            methods.setdefault(name, []).extend(_functions_in(member))
    own = [value for module in modules for value in vars(module).values()]
    waiting = [*methods.get("forward", ()), *(one for value in own for one in _functions_in(value))]
    found: dict[types.FunctionType, None] = {}
    while waiting:
        function = waiting.pop()
        if function in found or not _is_of_script(function.__module__):
            continue
        found[function] = None
        for instruction in _instructions(function.__code__):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                waiting += methods.get(instruction.argval, ())
            elif instruction.opname == "LOAD_GLOBAL":
                waiting += _functions_in(function.__globals__.get(instruction.argval))
    return list(found)


def read_by(root: nn.Module) -> Iterator[tuple[GlobalName, Hashable]]:
    """Yields the global variables that calls of `root` read, each with its present form; see `form_of`."""
    seen = set()
    for function in functions_of(root):
        for instruction in _instructions(function.__code__):
            variable = GlobalName(function.__globals__, instruction.argval)
            key = id(function.__globals__), instruction.argval
            if instruction.opname == "LOAD_GLOBAL" and key not in seen and variable.name in variable.namespace:
                seen.add(key)
                form = form_of(variable.namespace[variable.name])
                if form is not None:
                    yield variable, form


def written_by(root: nn.Module) -> Iterator[Write]:
    """Yields the places where calls of `root` change a global variable: by assignment, or as a list or dict."""
    for function in functions_of(root):
        instructions = list(_instructions(function.__code__))
        for at, instruction in enumerate(instructions):
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                yield Write(instruction.argval, function)
            elif instruction.opname == "LOAD_GLOBAL" and _is_container(function.__globals__.get(instruction.argval)):
                following = [(one.opname, one.argval) for one in instructions[at + 1 : at + 3]]
                is_method = any(op in ("LOAD_ATTR", "LOAD_METHOD") and arg in _CHANGING for op, arg in following[:1])
                if is_method or any(op == "STORE_SUBSCR" for op, _ in following):
                    yield Write(instruction.argval, function)


def form_of(value: Any, depth: int = _MAX_DEPTH) -> Hashable | None:
    """Returns what is equal as long as `value` is; None for what is not compared: tensors, modules, long containers."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if depth == 0:
        return None
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        parts = list(value.items()) if isinstance(value, dict) else value
    elif isinstance(value, (argparse.Namespace, types.SimpleNamespace)) or _is_record(value):
        parts = list(vars(value).items())
    else:
        return None
    if len(parts) > _MAX_LENGTH:
        return None
    forms = [form_of(part, depth - 1) for part in parts]
    if any(form is None for form in forms):
        return None
    return type(value), frozenset(forms) if isinstance(value, (set, frozenset)) else tuple(forms)


class GlobalsOfModel:
    """The global variables of one Python module as the functions of a model see them, as attributes.

    Args:
        root: The model.
        path: `GlobalName.path` of one of them.
    """

    _namespaces: list[dict[str, Any]]

    def __init__(self, root: nn.Module, path: str) -> None:
        name = path.removeprefix(PATH)
        namespaces = [function.__globals__ for function in functions_of(root)]
        found = {id(one): one for one in namespaces if one.get("__name__", "") == name}
        vars(self)["_namespaces"] = list(found.values())

    def __getattr__(self, name: str) -> Any:
        for namespace in self._namespaces:
            if name in namespace:
                return namespace[name]
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        for namespace in self._namespaces:
            namespace[name] = value


def _functions_in(member: Any) -> list[types.FunctionType]:
    """Returns the functions that a member of a class, or the value of a global variable, stands for."""
    if isinstance(member, property):
        return [one for part in (member.fget, member.fset) for one in _functions_in(part)]
    if isinstance(member, type):
        is_ours = _is_of_script(member.__module__) and not issubclass(member, nn.Module)
        return [one for part in vars(member).values() for one in _functions_in(part)] if is_ours else []
    if isinstance(member, functools.partial):
        return _functions_in(member.func)
    function = getattr(member, "__wrapped__", getattr(member, "__func__", member))
    return [function] if isinstance(function, types.FunctionType) else []


def _instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
    """Yields the instructions of a function and of the functions inside it."""
    yield from dis.get_instructions(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _instructions(constant)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set)) or hasattr(value, "appendleft")


def _is_record(value: Any) -> bool:
    """Returns whether `value` is an object of the script with nothing but attributes: settings, a counter."""
    kind = type(value)
    if isinstance(value, (type, nn.Module, torch.Tensor)) or not hasattr(value, "__dict__"):
        return False
    return dataclasses.is_dataclass(value) or (_is_of_script(kind.__module__) and kind.__bases__ == (object,))


@functools.lru_cache(maxsize=4096)
def _is_of_script(name: str) -> bool:
    """Returns whether a Python module is the script's own: not of an installed library, Python or this package."""
    if name in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    if file is None or name.partition(".")[0] in ("moreh_ap", "moreh"):
        return False
    installed = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    path = Path(file)
    return not any(path.is_relative_to(folder) for folder in installed) and "site-packages" not in path.parts
