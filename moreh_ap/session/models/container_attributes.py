"""Lists, dicts and sets among the attributes of a model's modules, which scripts change in place.

Decides which of them have changed since the workers got them: setting an attribute is seen at once, ``.append`` is not.
Only containers of plain values and tensors are compared; another tensor object is a change, new values in it are not.
Must not know workers or messages.
"""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import nn

from moreh_ap.protocol.blocks import OF_EVERY_MODULE
from moreh_ap.protocol.module_attributes import namespace_of

_KINDS = (list, dict, set, OrderedDict, defaultdict)
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)
_ITEMS = (*_PLAIN, torch.Tensor)


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
        if name not in OF_EVERY_MODULE and type(value) in _KINDS and not _is_private(module, name) and _is_plain(value):
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
            if type(value) in _KINDS and _is_plain(value):
                changes.append((*key, value))
                self.known[key] = attributes, _copy(value)
            else:
                del self.known[key]
        return changes


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
    """Returns whether the attribute is internal to transformers, so that no script changes it between calls."""
    is_its_own = name.startswith("_") or name == "all_tied_weights_keys"
    return is_its_own and type(module).__module__.startswith("transformers.")


def _copy(value: Any) -> Any:
    """Returns copies of the containers with the same items."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copy, value))
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copy(item)
        return copied
    return value.copy() if isinstance(value, set) else value


def _same(value: Any, known: Any) -> bool:
    if value is known:
        return True
    if type(value) is not type(known) or isinstance(value, torch.Tensor):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(known) and all(map(_same, value, known))
    if isinstance(value, dict):
        return value.keys() == known.keys() and all(_same(value[key], known[key]) for key in known)
    try:
        return bool(value == known)
    except Exception:  # of any class: an object in the container may define __eq__ itself, as arrays do
        return False


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _ITEMS)
