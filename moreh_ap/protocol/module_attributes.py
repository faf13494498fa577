"""Attributes that a forward sets on parts of a model: ``self.last_loss = loss``, ``self.attention = weights``.

Decides which of them changed in a forward and which can be answered with its result. Must not know who asks for them.
Looked at are parts whose class is the user's; what classes of libraries keep for themselves is their own, but for lists
(PEFT's of adapters that are merged into a weight, which a forward takes out again where they are disabled), and tensors
where there is a hook (the weight that spectral normalisation or pruning computes for each forward).
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.protocol.blocks import OF_EVERY_MODULE
from moreh_ap.protocol.pytree import flatten, is_container

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "diffusers", "moreh_ap")
"""Packages whose hooks and modules do their work inside the model: nothing of theirs is reported."""

OF_EACH_PROCESS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes that every process keeps for itself: an RNN lists its weights, those of the last `functional_call` too."""

_OF_THIS_PACKAGE = "_moreh_"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MAX_LOOKED_INTO = 64  # of a longer container (a vocabulary) only the length is compared

Marks = dict[str, Any]
"""Fingerprints of attributes, which show changes, by the path and name of each, such as ``encoder.attention``."""


class Attributes:
    """The attributes of a model's own parts.

    Args:
        root: The model, with all its parts.
        with_buffers: Whether buffers are looked at, too, from when a forward first keeps a result with its graph there.

    Attributes:
        buffers: The buffers that are looked at.
    """

    def __init__(self, root: nn.Module, with_buffers: bool = False) -> None:
        self._submodules = [
            (path, submodule) for path, submodule in root.named_modules() if _is_of_user(type(submodule))
        ]
        self._of_libraries = [
            (path, submodule, name)
            for path, submodule in root.named_modules()
            if not _is_of_user(type(submodule))
            for name, value in _kept(submodule, "_")
            if type(value) is list or _is_computed_by_hook(submodule, value)
        ]
        self._by_path = dict(root.named_modules())
        self._with_buffers = [each for each in self._submodules if with_buffers and each[1]._buffers]
        self.buffers: set[str] = set()

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return bool(self._submodules or self._of_libraries)

    def marks(self) -> Marks:
        """Returns the fingerprints of the present attributes."""
        return {name: mark_of(value) for name, value in self._values()}

    def changed(self, before: Marks, among: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the attributes that were set or changed since, and their values, in the order of their names.

        Args:
            before: Their fingerprints then.
            among: The attributes that are looked at; None for all.
        """
        values = self._values() if among is None else self._present(among)
        found = {name: value for name, value in values if name not in before or not is_marked(value, before[name])}
        return {name: found[name] for name in sorted(found)}

    def _present(self, names: Collection[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            path, _, last = name.rpartition(".")
            module = self._by_path.get(path)
            held = {} if module is None else namespace_of(module, last)
            if last in held:
                yield name, held[last]

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, submodule in self._submodules:
            for name, value in _kept(submodule, _OF_THIS_PACKAGE):
                yield full_name(path, name), value
        for path, submodule, name in self._of_libraries:
            if name in vars(submodule):
                yield full_name(path, name), vars(submodule)[name]
        for path, submodule in self._with_buffers:
            for name, buffer in submodule._buffers.items():
                if buffer is not None and buffer.requires_grad:
                    self.buffers.add(full_name(path, name))
                if self.buffers and full_name(path, name) in self.buffers:
                    yield full_name(path, name), buffer


class HeldAttributes:
    """What the user's parts of a model have in attributes now, to be put back.

    Args:
        root: The model, with all its parts.
    """

    def __init__(self, root: nn.Module) -> None:
        self._held = [
            (path, submodule, dict(_kept(submodule, _OF_THIS_PACKAGE)))
            for path, submodule in root.named_modules()
            if _is_of_user(type(submodule))
        ]
        self._contents = [
            (full_name(path, name), value, value.copy())
            for path, _, held in self._held
            for name, value in held.items()
            if type(value) in (list, dict, set)
        ]

    def put_back(self, but: Collection[str]) -> None:
        """Puts back all attributes, and what is in lists, dicts and sets, but those of these paths and names."""
        for path, submodule, held in self._held:
            now = dict(_kept(submodule, _OF_THIS_PACKAGE))
            for name in now.keys() | held.keys():
                if now.get(name, self) is held.get(name, self) or full_name(path, name) in but:
                    continue
                if name in held:
                    vars(submodule)[name] = held[name]
                else:
                    del vars(submodule)[name]
        for name, container, contents in self._contents:
            if name not in but and not has_same_items(container, contents):
                refill(container, contents)


def has_same_items(container: Any, contents: Any) -> bool:
    """Says whether a list, dict or set has the very items that it had."""
    items, others = (
        [part for item in one.items() for part in item] if isinstance(one, dict) else list(one)
        for one in (container, contents)
    )
    return len(items) == len(others) and all(map(operator.is_, items, others))


def refill(container: Any, contents: Any) -> None:
    """Gives a list, dict or set the items that it had."""
    container.clear()
    add = container.extend if isinstance(container, list) else container.update
    add(contents)


def full_name(path: str, name: str) -> str:
    """Returns what an attribute of the part at `path` is called."""
    return f"{path}.{name}" if path else name


def namespace_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Returns the dict in which a module has an attribute, which may be a buffer."""
    return module._buffers if name in module._buffers else vars(module)


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Returns what the class of a module keeps in its instances; of a library's class what is not private to it."""
    return dict(_kept(module, _OF_THIS_PACKAGE if _is_of_user(type(module)) else "_"))


def _kept(module: nn.Module, hidden: str) -> Iterator[tuple[str, Any]]:
    values = vars(module)
    for name in values.keys() - OF_EVERY_MODULE:  # in C: this is done before and after every forward
        if not name.startswith(hidden):
            yield name, values[name]


def num_leaves(value: Any) -> int | None:
    """Returns how many leaves an attribute's value has; None if it is not made of tensors and plain values alone."""
    try:
        leaves = flatten(value)[0]
    except UnsupportedError:
        return None
    is_known = all(has_memory(leaf) if isinstance(leaf, Tensor) else isinstance(leaf, _PLAIN) for leaf in leaves)
    return len(leaves) if is_known else None


def is_same_container(value: Any, mark: Any) -> bool:
    """Returns whether an attribute is the list, dict or set that it was when it was marked."""
    return isinstance(value, (list, dict, set)) and mark is not None and mark[0] is value


def is_overwritten(value: Any, mark: Any) -> bool:
    """Returns whether each entry of a list or dict that had as many, or these keys, when it was marked was set anew."""
    inside = mark[1] if isinstance(value, (list, dict)) and mark is not None else None
    if isinstance(inside, list):
        return 0 < len(inside) == len(value) and not any(map(is_marked, value, inside))
    if not isinstance(inside, dict) or inside.keys() != value.keys():
        return False
    return not any(is_marked(value[key], inside[key]) for key in inside)


def has_memory(tensor: Tensor) -> bool:
    """Returns whether the tensor can be read: FSDP2 frees the memory of whole parameters after a forward."""
    return tensor.numel() == 0 or tensor.untyped_storage().size() > 0


def mark_of(value: Any) -> Any:
    """Returns a fingerprint to compare later, which keeps no tensor alive: setting a new one frees the old one."""
    if isinstance(value, _PLAIN):
        return value, None
    if isinstance(value, Tensor):
        return weakref.ref(value), _version_of(value)
    if is_container(value, (list, tuple)):
        return value, [mark_of(item) for item in value] if len(value) <= _MAX_LOOKED_INTO else len(value)
    if is_container(value, (dict,)):
        return value, {key: mark_of(value[key]) for key in value} if len(value) <= _MAX_LOOKED_INTO else len(value)
    return value, len(value) if is_container(value, (set,)) else None


def is_marked(value: Any, mark: tuple[Any, Any]) -> bool:
    """Returns whether a value is what it was when it was marked."""
    was, inside = mark
    if isinstance(value, Tensor):
        is_it = isinstance(was, weakref.ref) and was() is value
        return is_it and bool(inside == _version_of(value))
    if isinstance(value, _PLAIN):
        return type(was) is type(value) and was == value
    if was is not value:
        return False
    if isinstance(inside, list):
        return len(inside) == len(value) and all(map(is_marked, value, inside))
    if isinstance(inside, dict):
        return inside.keys() == value.keys() and all(is_marked(value[key], inside[key]) for key in inside)
    return bool(inside is None or inside == len(value))


def _version_of(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():  # to look whether it changed is not to read it
        return 0 if tensor.is_inference() else tensor._version


def computed_by_hooks(root: nn.Module) -> frozenset[str]:
    """Returns the attributes of modules of libraries that hooks compute, the same ones in each forward."""
    return frozenset(
        full_name(path, name)
        for path, submodule in root.named_modules()
        if not _is_of_user(type(submodule))
        for name, value in _kept(submodule, "_")
        if _is_computed_by_hook(submodule, value)
    )


def _is_computed_by_hook(module: nn.Module, value: Any) -> bool:
    return isinstance(value, Tensor) and bool(module._forward_pre_hooks or module._forward_hooks)


def _is_of_user(cls: type) -> bool:
    """Whether the class, or its base where FSDP2 derived it, is none of a library."""
    return any(base.__module__.split(".")[0] not in (*LIBRARIES, "builtins", "typing") for base in cls.__mro__)
