"""The script's functions: what they are made of, and to which others they come.

Decides which functions a value stands for, and which names a function's code has. Must not know models, hooks or
variables.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from moreh_ap.protocol.script_code.value_forms import is_of_script


def functions_in(member: Any) -> list[types.FunctionType]:
    """Returns the functions that a member of a class, or the value of a global variable, stands for."""
    if isinstance(member, property):
        return [one for part in (member.fget, member.fset) for one in functions_in(part)]
    if isinstance(member, type):
        is_ours = is_of_script(member.__module__) and not issubclass(member, nn.Module)
        return [one for part in vars(member).values() for one in functions_in(part)] if is_ours else []
    if isinstance(member, functools.partial):
        return functions_in(member.func)
    is_bound = isinstance(member, (types.MethodType, staticmethod, classmethod))
    function = member.__func__ if is_bound else member
    while "__wrapped__" in getattr(function, "__dict__", ()):  # a function in its decorators
        function = function.__wrapped__
    return [function] if isinstance(function, types.FunctionType) else []


def functions_from(
    waiting: list[types.FunctionType], methods: Mapping[str, list[types.FunctionType]]
) -> list[types.FunctionType]:
    """Returns the script's functions among some, and those that they name.

    Args:
        waiting: Some functions; used up.
        methods: Those of the objects that they work with, by name.
    """
    found: dict[types.FunctionType, None] = {}
    while waiting:
        function = waiting.pop()
        if function in found or not is_of_script(function.__module__):
            continue
        found[function] = None
        for instruction in instructions(function.__code__):
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                waiting += methods.get(instruction.argval, ())
            elif instruction.opname == "LOAD_GLOBAL":
                waiting += functions_in(function.__globals__.get(instruction.argval))
    return list(found)


@functools.lru_cache(maxsize=4096)
def instructions(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """Returns the instructions of a function and of the functions inside it."""
    inside = (
        one for constant in code.co_consts if isinstance(constant, types.CodeType) for one in instructions(constant)
    )
    return (*dis.get_instructions(code), *inside)


def cells_of(function: types.FunctionType) -> dict[str, types.CellType]:
    """Returns what holds the variables of enclosing functions; what ``super()`` needs is none."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells.pop("__class__", None)
    return cells


def behind_own_call(module: nn.Module) -> Callable[..., Any]:
    """Returns what calls a module as the script's own `__call__` methods of its class do, which the script has run.

    What the accelerator gets of such a call is what these methods give to `nn.Module.__call__`.
    """
    classes = (base for base in type(module).__mro__ if "__call__" in vars(base))
    own = next(vars(base)["__call__"] for base in classes if not is_of_script(base.__module__))
    return functools.partial(own, module)


def title_of(function: types.FunctionType) -> str:
    """Returns a function's name and line, as in the path of a variable of its closure."""
    return f"{function.__module__}.{function.__qualname__} (line {function.__code__.co_firstlineno})"
