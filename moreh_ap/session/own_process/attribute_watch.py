"""Attributes of modules between calls: whether one has tensors on the accelerator, or a call has put something there.

Decides by identity and length, which takes a microsecond a module. Must not know what is done about it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.script_code.value_forms import is_of_script
from moreh_ap.session.own_process.stand_ins import PLAIN

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GROWING = (list, dict, set, deque)

Parts = Sequence[tuple[nn.Module, Sequence[str]]]


class AttributeWatch:
    """The attributes of a model's modules, as they were when they were looked at last."""

    def __init__(self) -> None:
        self._known: dict[int, _Attributes] = {}  # by module

    def parts_of(self, module: nn.Module) -> Parts | None:
        """Returns a module and all modules in it, each with the names of its attributes that list parameters.

        Returns:
            None if a hook or an attribute of one of them has to do with tensors on the accelerator.
        """
        modules, found = [module], []
        seen = {id(module)}
        for part in modules:
            namespace = part.__dict__
            if any(namespace[name] for name in _HOOKS):
                return None
            known = self._known.get(id(part))
            if known is None or not known.is_of(namespace):
                known = self._known[id(part)] = _Attributes(namespace)
            if not known.are_plain:
                return None
            found.append((part, known.lists))
            for child in namespace["_modules"].values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    modules.append(child)
        return found

    def have_no_new_tensor(self, parts: Parts) -> bool:
        """Returns whether a call has put nothing but plain values into attributes of `parts`."""
        for part, _ in parts:
            known, namespace = self._known[id(part)], part.__dict__
            if not known.is_of(namespace):
                if not known.differs_in_plain_values(namespace):
                    return False
                self._known[id(part)] = _Attributes(namespace)
        return True


class _Attributes:
    """The attributes of one module.

    Args:
        namespace: What ``vars`` of the module gives.

    Attributes:
        lists: The names of those that are lists of accelerator tensors, or of weak references to them (LSTM).
        are_plain: Whether no other has an accelerator tensor, or is an object of a class of the script that may.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._ids = [*map(id, namespace.values())]  # not the values: they may lead to the root
        self._names = [*namespace]
        own = {name: value for name, value in namespace.items() if name not in _OF_EVERY_MODULE}
        self._sizes = [(name, len(value)) for name, value in own.items() if isinstance(value, _GROWING)]
        self.lists = [name for name, value in own.items() if type(value) is list and any(map(_is_virtual, value))]
        self.are_plain = all(_is_plain(value) for name, value in own.items() if name not in self.lists)

    def is_of(self, namespace: dict[str, Any]) -> bool:
        """Returns whether a namespace still has these values."""
        if self._ids != [*map(id, namespace.values())]:
            return False
        return not self._sizes or all(len(namespace[name]) == size for name, size in self._sizes)

    def differs_in_plain_values(self, namespace: dict[str, Any]) -> bool:
        """Returns whether a namespace has other plain values, and no other difference."""
        before = dict(zip(self._names, self._ids))
        changed = [value for name, value in namespace.items() if before.get(name) != id(value)]
        kept = namespace.keys() >= before.keys() and all(len(namespace[name]) == size for name, size in self._sizes)
        return kept and all(isinstance(value, PLAIN) for value in changed)


def _is_virtual(value: Any) -> bool:
    return isinstance(value() if isinstance(value, weakref.ref) else value, VirtualTensor)


def _is_plain(value: Any) -> bool:
    """Returns whether a value has no accelerator tensor, nor a place of the script's where one may come to be."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, VirtualTensor):
            return False
        if isinstance(leaf, (*PLAIN, Tensor, nn.Module)) or not is_of_script(type(leaf).__module__):
            continue
        own = getattr(leaf, "__dict__", None)
        if own is None or not all(isinstance(one, PLAIN) for one in own.values()):
            return False
    return True
