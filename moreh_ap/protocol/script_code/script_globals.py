"""Variables outside of a model that its forwards use: which there are, and which of them the forwards change.

They are globals of the script's Python modules, attributes of its classes (``CFG.gain``) and of the classes of the
model, and variables of enclosing functions. Hooks whose return value counts read such variables too, and attributes of
their own object. Decides which functions a forward may come to, and which names they read. How values are compared is
for `value_forms.py` to say; how changes travel is not known here.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from moreh_ap.protocol.hook_records import QuietHook, ReportedHook
from moreh_ap.protocol.script_code.library_settings import settings_of
from moreh_ap.protocol.script_code.script_functions import (
    cells_of,
    functions_from,
    functions_in,
    instructions,
    title_of,
)
from moreh_ap.protocol.script_code.value_forms import is_alike, is_of_script, is_record

PATH, CLASS, CLOSURE, HOOK = "globals of ", "class ", "closure of ", "hook "
"""Prefixes of a `Variable`'s path; the name of the namespace, class, function or hook that has the variable follows."""

_FILLING = {"append", "extend", "insert", "add", "update", "remove", "clear", "appendleft"}
_CHANGING = {*_FILLING, "setdefault", "pop", "popitem"}
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, property)
_NO_SETTING = (*_CALLABLE, classmethod, staticmethod, type)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Variable(NamedTuple):
    """A variable outside of the model.

    Attributes:
        path: Where it is, in place of the path of a submodule in messages about changed attributes.
        holder: What has it: the namespace of a Python module, the cell of a closure, the attributes of an object.
        name: Its name there; an attribute of a class has the name of the class in front (``CFG.gain``).
    """

    path: str
    holder: Any
    name: str

    @property
    def is_imported(self) -> bool:
        """Whether workers have imported it with its Python module, and not got it with the model."""
        is_own = self.path == f"{PATH}__main__" or self.path.startswith(f"{CLASS}__main__.")
        return self.path.startswith((PATH, CLASS)) and not is_own

    def value(self) -> Any:
        """Returns its present value; None if it has none."""
        return getattr(_Names(self.holder), self.name, None)

    def set(self, value: Any) -> None:
        """Sets it."""
        setattr(_Names(self.holder), self.name, value)


class Write(NamedTuple):
    """A place where a function changes a variable outside of it."""

    name: str
    function: types.FunctionType


def functions_of(root: nn.Module, with_hooks: bool = False, with_submodules: bool = True) -> list[types.FunctionType]:
    """Returns the script's functions that a call of `root` may come to: its forwards and what these name.

    Args:
        with_hooks: Also functions of hooks that return something: what others read, no result depends on.
        with_submodules: Also those of the modules in `root`.
    """
    modules = list(root.modules()) if with_submodules else [root]
    methods: dict[str, list[types.FunctionType]] = {}
    for kind in dict.fromkeys(kind for module in modules for kind in type(module).__mro__):
        for name, member in vars(kind).items() if is_of_script(kind.__module__) else ():
            methods.setdefault(name, []).extend(functions_in(member))
    own = [value for module in modules for value in vars(module).values()]
    waiting = [*methods.get("forward", ()), *(one for value in own for one in functions_in(value))]
    if with_hooks:
        waiting += [function for hook in _hooks_of(root).values() for function in _functions_of_hook(hook)]
    return functions_from(waiting, methods)


def used_by_method(kind: type, method: Callable[..., Any]) -> tuple[list[Variable], list[Write], frozenset[str]]:
    """Returns the variables outside of an object that a method reads, the places where it changes some, and all strings
    in its code: names of attributes, also those for `getattr`.

    Args:
        kind: The object's class, whose other methods the method may call.
        method: A function.
    """
    methods: dict[str, list[types.FunctionType]] = {}
    for base in kind.__mro__:
        for name, member in vars(base).items() if is_of_script(base.__module__) else ():
            methods.setdefault(name, []).extend(functions_in(member))
    functions = functions_from(functions_in(method), methods)
    arguments = (each.argval for function in functions for each in instructions(function.__code__))
    names = frozenset(one for one in arguments if isinstance(one, str))
    return [one for function in functions for one in _read_in(function)], [*_written_in(functions)], names


def read_by(root: nn.Module) -> list[Variable]:
    """Returns the variables outside of `root` that its calls, and hooks that count in them, read."""
    found: dict[tuple[str, str, int], Variable] = {}

    def add(variable: Variable) -> None:
        found.setdefault((variable.path, variable.name, id(variable.holder)), variable)

    kinds = _classes_of(root)
    for function in functions_of(root, with_hooks=True):
        for variable in _read_in(function):
            add(variable)
        for instruction in instructions(function.__code__):
            name = instruction.argval
            if instruction.opname == "LOAD_ATTR":
                for path, kind in kinds.items():
                    if not isinstance(vars(kind).get(name, print), _NO_SETTING) and not name.startswith("__"):
                        add(Variable(path, kind, name))
    for namespace, name in settings_of(root):
        add(Variable(f"{PATH}{namespace['__name__']}", namespace, name))
    for place, hook in _hooks_of(root).items():
        state = _state_of(hook)
        for name in _names_read(hook):
            add(Variable(f"{HOOK}{place}", state, name))
    return list(found.values())


def _read_in(function: types.FunctionType) -> Iterator[Variable]:
    """Yields the variables outside of a function that it reads."""
    cells, code = cells_of(function), instructions(function.__code__)
    for at, instruction in enumerate(code):
        name, following = instruction.argval, code[at + 1 : at + 3]
        if instruction.opname == "LOAD_GLOBAL" and name in function.__globals__:
            yield from _reached(function.__globals__, name, following)
        elif instruction.opname == "LOAD_DEREF" and name in cells:
            variable = Variable(f"{CLOSURE}{title_of(function)}", cells[name], name)
            if not _is_filled(variable.value(), following):
                yield variable


def kept_outside(root: nn.Module) -> list[Variable]:
    """Returns what a call of `root` may change outside of it: variables that it reads, and all that hooks keep."""
    read = [variable for variable in read_by(root) if not variable.path.startswith(HOOK)]
    states = ((place, _state_of(hook)) for place, hook in _hooks_of(root).items())
    return [*read, *(Variable(f"{HOOK}{place}", state, name) for place, state in states for name in state)]


def written_by(root: nn.Module) -> Iterator[Write]:
    """Yields the places where calls of `root` change a variable: by assignment, or as a list, dict or object."""
    return _written_in(functions_of(root))


def _written_in(functions: Iterable[types.FunctionType]) -> Iterator[Write]:
    for function in functions:
        cells = cells_of(function)
        code = instructions(function.__code__)
        for at, instruction in enumerate(code):
            name, following = instruction.argval, code[at + 1 : at + 3]
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                is_written = True
            elif instruction.opname == "LOAD_GLOBAL":
                is_written = _is_changed(function.__globals__.get(name), following)
            elif instruction.opname == "STORE_DEREF":
                is_written = name in cells
            else:
                is_read = instruction.opname == "LOAD_DEREF" and name in cells
                is_written = is_read and _is_changed(getattr(_Names(cells[name]), name, None), following)
            if is_written:
                yield Write(name, function)


class VariablesOfModel:
    """Variables as the functions of a model see them, as attributes: those of one Python module, function or hook.

    Args:
        root: The model.
        path: `Variable.path` of one of them.
    """

    _holders: list[_Names]

    def __init__(self, root: nn.Module, path: str) -> None:
        vars(self)["_holders"] = [_Names(holder) for holder in _holders_of(root, path)]

    def __getattr__(self, name: str) -> Any:
        for holder in self._holders:
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        for holder in self._holders:
            # Others may know an object that is there.
            if holder.may_have(name) and not is_alike(getattr(holder, name, None), value):
                setattr(holder, name, value)


def is_variable(path: str) -> bool:
    """Returns whether a path means variables outside of the model."""
    return path.startswith((PATH, CLASS, CLOSURE, HOOK))


class _Names:
    """The names in a dictionary, or in the cells of a closure by their names, as attributes."""

    def __init__(self, holder: Any) -> None:
        vars(self)["_holder"] = holder

    def __getattr__(self, name: str) -> Any:
        holder, last = self._within(name)
        try:
            if isinstance(holder, types.CellType):
                return holder.cell_contents
            return holder[last] if isinstance(holder, dict) else getattr(holder, last)
        except (KeyError, ValueError):  # a cell without a value
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        holder, last = self._within(name)
        if isinstance(holder, types.CellType):
            holder.cell_contents = value
        elif isinstance(holder, dict):
            holder[last] = value
        else:
            setattr(holder, last, value)

    def may_have(self, name: str) -> bool:
        """Returns whether there is a place for a name: any in a dictionary, but not in a closure, nor in a class."""
        holder, _ = self._within(name)
        return holder is not None and not isinstance(holder, _CellsByName)

    def _within(self, name: str) -> tuple[Any, str]:
        """Returns what has the last name of a dotted one, and that."""
        holder = vars(self)["_holder"]
        if isinstance(holder, _CellsByName):
            return holder.get(name, holder), name
        first, dot, last = name.partition(".")
        return (holder.get(first), last) if dot else (holder, name)


class _CellsByName(dict[str, types.CellType]):
    """The cells of one function's closure."""


def _holders_of(root: nn.Module, path: str) -> list[Any]:
    """Returns what has the variables of a path: dictionaries, or cells."""
    functions = functions_of(root, with_hooks=True)
    if path.startswith(PATH):
        name = path.removeprefix(PATH)
        namespaces = [function.__globals__ for function in functions]
        if name != "__main__" and name in sys.modules:
            namespaces.append(vars(sys.modules[name]))
        return list({id(one): one for one in namespaces if one.get("__name__", "") == name}.values())
    if path.startswith(CLASS):
        return [_classes_of(root)[path]]
    if path.startswith(CLOSURE):
        title = path.removeprefix(CLOSURE)
        return [_CellsByName(cells_of(function)) for function in functions if title_of(function) == title]
    hook = _hooks_of(root).get(path.removeprefix(HOOK))
    return [] if hook is None else [_state_of(hook)]


def _classes_of(root: nn.Module) -> dict[str, type]:
    """Returns the script's classes that modules of a model are of, by what stands for the path of a submodule."""
    kinds = (kind for module in root.modules() for kind in type(module).__mro__ if is_of_script(kind.__module__))
    return {f"{CLASS}{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def _reached(namespace: dict[str, Any], name: str, following: Sequence[dis.Instruction]) -> Iterator[Variable]:
    """Yields the variable that a function reads where it loads a global name, and perhaps an attribute of it."""
    value = namespace[name]
    is_followed = bool(following) and following[0].opname in ("LOAD_ATTR", "LOAD_METHOD")
    attribute = following[0].argval if is_followed else None
    path = f"{PATH}{namespace.get('__name__', '')}"
    if isinstance(value, types.ModuleType):
        if attribute in vars(value) and is_of_script(value.__name__):
            yield from _reached(vars(value), str(attribute), following[1:])
    elif isinstance(value, type):
        is_settings = is_of_script(value.__module__) and not issubclass(value, (nn.Module, enum.Enum))
        if is_settings and attribute is not None and not isinstance(getattr(value, attribute, print), _CALLABLE):
            yield Variable(path, namespace, f"{name}.{attribute}")
    elif not _stays(name, value) and not _is_filled(value, following):
        yield Variable(path, namespace, name)


def _stays(name: str, value: Any) -> bool:
    """Returns whether no script puts something else in the place of a value: a function of a library, a logger."""
    is_of_library = isinstance(value, _CALLABLE) and not is_of_script(getattr(value, "__module__", None) or "builtins")
    return isinstance(value, logging.Logger) or (is_of_library and getattr(value, "__name__", "") == name)


def _is_filled(value: Any, following: Sequence[dis.Instruction], methods: Collection[str] = _FILLING) -> bool:
    """Returns whether a value is a container, and instructions that follow its loading change it without reading it."""
    if not isinstance(value, (list, dict, set, deque)):
        return False
    steps = [(one.opname, one.argval) for one in following]
    is_method = any(op in ("LOAD_ATTR", "LOAD_METHOD") and arg in methods for op, arg in steps[:1])
    return is_method or any(op == "STORE_SUBSCR" for op, _ in steps)


def _is_changed(value: Any, following: Sequence[dis.Instruction]) -> bool:
    """Returns whether instructions that follow the loading of a value change it in place."""
    if isinstance(value, (list, dict, set, deque)):
        return _is_filled(value, following, _CHANGING)
    is_class = isinstance(value, type) and is_of_script(value.__module__)
    if not (is_class or is_record(value)):
        return False
    first, second = [*(one.opname for one in following), "", ""][:2]
    return first == "STORE_ATTR" or (first in ("COPY", "DUP_TOP") and second == "LOAD_ATTR")  # STATE.count += 1


# -- hooks -------------------------------------------------------------------------------------------------------------


def _hooks_of(root: nn.Module) -> dict[str, Any]:
    """Returns the hooks on a model, in a worker those that stand behind the ones there, by their places."""
    found = {}
    for path, module in root.named_modules():
        for where in _HOOKS:
            for key, hook in getattr(module, where).items():
                is_stand_in = isinstance(hook, (ReportedHook, QuietHook))
                found[f"{where} {key} of {path}"] = hook.hook if is_stand_in else hook
    return found


def _functions_of_hook(hook: Any) -> list[types.FunctionType]:
    """Returns the script's function of a hook that may return something."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    is_function = isinstance(hook, (types.FunctionType, types.MethodType))
    found = functions_in(hook if is_function else vars(type(hook)).get("__call__"))
    return [one for one in found if is_of_script(one.__module__) and _returns_something(one.__code__)]


def _returns_something(code: types.CodeType) -> bool:
    before = None
    for instruction in dis.get_instructions(code):
        is_constant = instruction.opname == "RETURN_CONST" and instruction.argval is not None
        is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
        if is_constant or (instruction.opname == "RETURN_VALUE" and not is_none):
            return True
        before = instruction
    return False


def _state_of(hook: Any) -> dict[str, Any]:
    """Returns the attributes of the object whose method a hook is, or of which it is a call."""
    if isinstance(hook, functools.partial):
        return hook.keywords
    owner = hook.__self__ if isinstance(hook, types.MethodType) else hook
    is_of_torch = type(owner).__module__.startswith("torch.")  # FSDP's own state, which no trial may put back
    if is_of_torch or isinstance(owner, (nn.Module, types.FunctionType, type)):
        return {}
    return getattr(owner, "__dict__", {})


def _names_read(hook: Any) -> list[str]:
    """Returns which attributes of its object a hook that may return something reads, itself or through its methods."""
    state, waiting, seen = _state_of(hook), _functions_of_hook(hook), set()
    if isinstance(hook, functools.partial):
        return list(state) if waiting else []
    owner = hook.__self__ if isinstance(hook, types.MethodType) else hook
    found: dict[str, None] = {}
    while waiting:
        function = waiting.pop()
        seen.add(function)
        code = instructions(function.__code__)
        for at, instruction in enumerate(code):
            if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                continue
            if instruction.argval in state and not _is_filled(state[instruction.argval], code[at + 1 : at + 3]):
                found[instruction.argval] = None
            waiting += [one for one in functions_in(getattr(type(owner), instruction.argval, None)) if one not in seen]
    return list(found)
