"""Lists, dicts, sets and objects of settings among the attributes of a model's modules, which scripts change in place.

Decides which of them have changed since the workers got them: setting an attribute is seen at once, ``.append`` is not,
nor is ``model.args.gain = 2``. Only containers of plain values, tensors, small NumPy arrays and objects of settings are
compared; another tensor object is a change, new values in it are not. Must not know workers or messages.

[Note: objects of settings]
Several modules share such an object (``self.args = args``), and on the workers they share its copy. So an attribute of
it travels, and is set where the object is. Of a script's object those attributes are compared whose names the script's
functions have in them that a forward may come to: a counter of steps that no forward reads is sent to nobody.
"""

from __future__ import annotations

import argparse
import enum
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from moreh_ap.protocol.blocks import OF_EVERY_MODULE
from moreh_ap.protocol.module_attributes import OF_EACH_PROCESS, namespace_of
from moreh_ap.protocol.script_code.script_globals import functions_of
from moreh_ap.protocol.script_code.value_forms import is_of_script, is_record

_KINDS = (list, dict, set, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_ITEMS = (*_PLAIN, torch.Tensor)
_MOST_ARRAY_BYTES = 64 * 1024  # of an array that is compared at every call
_MOST_DEPTH = 6  # of containers and objects in each other


class Containers:
    """The contents that the workers have.

    Args:
        modules: The modules by path.

    Attributes:
        known: The attributes, by path and name, and their contents; empty for most models.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.known: dict[tuple[str, str], tuple[dict[str, Any], Any]] = {}
        for path, module in modules.items():
            for name, value in vars(module).items():
                self.note(path, module, name, value)

    def note(self, path: str, module: nn.Module, name: str, value: Any) -> None:
        """Records that the workers have, or are about to get, the present contents of `value`."""
        is_of_model = isinstance(value, (dict, np.ndarray)) and is_of_script(type(module).__module__)
        is_one = type(value) in _KINDS or is_of_model
        if name not in OF_EVERY_MODULE and is_one and not _is_private(module, name) and _is_plain(value):
            self.known[path, name] = vars(module), _copy(value)
        else:
            self.known.pop((path, name), None)

    def set(self, path: str, module: nn.Module, name: str, value: Any, *, in_place: bool) -> None:
        """Sets an attribute as the workers have it; `in_place`: in the container that the script has."""
        _set(namespace_of(module, name), name, value, in_place=in_place)
        held = namespace_of(module, name)[name]
        self.note(path, module, name, held)
        for key, (attributes, _) in self.known.items():
            if attributes.get(key[1]) is held:  # modules may share a container, as those of the workers do
                self.known[key] = attributes, _copy(held)

    def take_changes(self) -> list[tuple[str, str, Any]]:
        """Returns path, name and value of the containers that changed since the last call."""
        changes = []
        for key, (attributes, known) in list(self.known.items()):
            value = attributes.get(key[1])
            if _same(value, known):
                continue
            if isinstance(value, (list, dict, set, np.ndarray)) and _is_plain(value):
                changes.append((*key, value))
                self.known[key] = attributes, _copy(value)
            else:
                del self.known[key]
        return changes


class SettingsObjects:
    """What is in objects of settings as the workers have them. See [Note: objects of settings].

    Args:
        root: The model.

    Attributes:
        known: The objects, by `id`.
        has_some_of_script: Whether one is the script's.
        of_libraries: The attributes of the others, and as `were_of_libraries` those that the workers have.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._names: frozenset[str] | None = None
        self.known: dict[int, _Object] = {}
        self.has_some_of_script = False
        self.of_libraries: list[dict[str, Any]] = []
        self.were_of_libraries: list[dict[str, Any]] = []
        for module in root.modules():
            for name, value in vars(module).items():
                self.note(name, value)

    def note(self, name: str, value: Any, within: _Object | None = None) -> None:
        """Records that the workers have, or are about to get, an attribute of a module or object as it is now."""
        if self._names and isinstance(value, (types.FunctionType, types.MethodType)):
            self._names |= frozenset(_names_in_forwards(self._root))  # another forward may read other attributes
        if name in OF_EVERY_MODULE or not _is_settings(value):
            return
        self._names = self._names or frozenset(_names_in_forwards(self._root))
        known = self.known[id(value)] = _Object(value, self._present(value), name, within)
        self._sort()
        for key, inner in known.contents.items():
            if id(inner) not in self.known:
                self.note(key, inner, known)

    def take_changes(self) -> list[tuple[str, str, Any]]:
        """Returns a module's path, the dotted name and the value of attributes that changed since the last call."""
        return [change for known in list(self.known.values()) for change in self._changes(known)]

    def _sort(self) -> None:
        of_libraries = [one for one in self.known.values() if one.is_of_library]
        self.has_some_of_script = len(of_libraries) < len(self.known)
        self.of_libraries = [vars(one.value) for one in of_libraries]
        self.were_of_libraries = [one.contents for one in of_libraries]

    def _changes(self, known: _Object) -> list[tuple[str, str, Any]]:
        was, present = known.contents, self._present(known.value)
        changed = [key for key, value in present.items() if key not in was or not _same(value, was[key])]
        if not changed:
            return []
        known.contents = present
        places = self._places(known)
        if not places:
            del self.known[id(known.value)]
        values = {key: vars(known.value)[key] for key in sorted(changed)}
        for key, value in values.items():
            self.note(key, value, known)
        self._sort()
        return [(path, f"{name}.{key}", value) for key, value in values.items() for path, name in places]

    def _places(self, known: _Object) -> list[tuple[str, str]]:
        """Returns the path of each module that has an object, and the name, with dots, that it has there.

        Workers got an object that was set later a second time, so that modules need not share it there.
        """
        modules = self._root.named_modules()
        places = [(path, name) for path, module in modules for name, one in vars(module).items() if one is known.value]
        within = known.within
        if within is not None and vars(within.value).get(known.name) is known.value:
            places += [(path, f"{name}.{known.name}") for path, name in self._places(within)]
        return places

    def _present(self, value: Any) -> dict[str, Any]:
        """Returns what is compared of an object, as it is now; containers in a script's object are copied."""
        attributes = vars(value)
        if _is_of_library(value):  # its code reads what it likes
            return dict(attributes)
        assert self._names is not None, "set once there is an object"
        found = {key: attributes[key] for key in attributes.keys() & self._names}
        # Objects in an object are known by themselves; of what is not plain, only whether it is another one.
        return {key: one if is_record(one) or not _is_plain(one) else _copy(one) for key, one in found.items()}


class _Object:
    """An object of settings.

    Args:
        value: The object, kept alive so that no other gets its `id`.
        contents: What is compared of it, as the workers have it.
        name: Its name in what has it.
        within: The object that has it, unless a module does.
    """

    def __init__(self, value: Any, contents: dict[str, Any], name: str, within: _Object | None) -> None:
        self.value, self.contents, self.name, self.within = value, contents, name, within
        self.is_of_library = _is_of_library(value)


def _is_settings(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType)):
        return False
    is_config = kind.__module__.startswith("transformers.") and hasattr(kind, "model_type")
    return is_record(value) or (is_config and hasattr(value, "__dict__"))


def _is_of_library(value: object) -> bool:
    return not is_of_script(type(value).__module__) and not isinstance(
        value, (argparse.Namespace, types.SimpleNamespace)
    )


def _names_in_forwards(root: nn.Module) -> Iterator[str]:
    """Yields the names and texts in the script's functions that a call of `root` may come to."""
    waiting = [function.__code__ for function in functions_of(root, with_hooks=True)]
    while waiting:
        code = waiting.pop()
        yield from code.co_names
        yield from (one for one in code.co_consts if isinstance(one, str))
        waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _set(attributes: dict[str, Any], name: str, value: Any, *, in_place: bool) -> None:
    present: Any = attributes.get(name)
    if not in_place or type(present) is not type(value) or not isinstance(value, (list, dict, set)):
        attributes[name] = value
    elif isinstance(value, list):
        present[:] = value
    else:
        present.clear()
        present.update(value)


def _is_private(module: nn.Module, name: str) -> bool:
    """Returns whether the attribute is a process's own, or internal to transformers, where no script changes it."""
    if name in OF_EACH_PROCESS:
        return True
    is_its_own = name.startswith("_") or name == "all_tied_weights_keys"
    return is_its_own and type(module).__module__.startswith("transformers.")


def _copy(value: Any) -> Any:
    """Returns copies of the containers with the same items."""
    if type(value) in (list, tuple):  # no named one, whose class takes its items one by one
        return type(value)(map(_copy, value))
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if not isinstance(value, _ITEMS) and is_record(value):
        return _Attributes(_copy(vars(value)))
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _MOST_ARRAY_BYTES else value
    return value.copy() if isinstance(value, set) else value


def _same(value: Any, known: Any) -> bool:
    if value is known:
        return True
    if isinstance(known, _Attributes):
        return is_record(value) and _same(vars(value), dict(known))
    if isinstance(value, np.ndarray) and isinstance(known, np.ndarray):
        return (value.dtype, value.shape) == (known.dtype, known.shape) and value.tobytes() == known.tobytes()
    if isinstance(value, dict) and isinstance(known, dict):
        return value.keys() == known.keys() and all(_same(value[key], known[key]) for key in known)
    if type(value) is not type(known) or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(known) and all(map(_same, value, known))
    try:
        return bool(value == known)
    except Exception:  # of any class: an object in the container may define __eq__ itself, as arrays do
        return False


class _Attributes(dict[str, Any]):
    """The attributes of an object of settings in a container."""


def _is_plain(value: Any, depth: int = _MOST_DEPTH) -> bool:
    if isinstance(value, _ITEMS):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype != object and value.nbytes <= _MOST_ARRAY_BYTES
    if depth == 0:
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item, depth - 1) for key, item in value.items())
    return is_record(value) and _is_plain(vars(value), depth - 1)
