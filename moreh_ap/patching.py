"""What this package replaces in other libraries: a registry with target, effect, reason and undo of every change.

The controller has one registry (`device.patches.install`) and each worker has one (`runtime.worker.worker_patches`).
Nothing else assigns to attributes of other libraries. Knows neither side, nor what is replaced.
"""

from __future__ import annotations

import inspect
import os
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from moreh_ap import import_hook

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One change in another library.

    Attributes:
        target: Its dotted name, "torch.cuda.synchronize".
        effect: What it does while the change is in force, in one line.
        reason: Why the change is needed, in one line; patches of one group share it.
        undo: Restores what was there before. Called once.
    """

    target: str
    effect: str
    reason: str
    undo: Callable[[], None]


class Patches:
    """The changes in force in this process, in the order in which they were made."""

    def __init__(self) -> None:
        self._in_force: list[Patch] = []
        self._undo: list[Callable[[], None]] = []
        _REGISTRIES.add(self)

    def group(self, reason: str) -> PatchGroup:
        """Changes that are made for one reason."""
        return PatchGroup(self, reason)

    def note(self, patch: Patch) -> None:
        """Note a change that has been made already."""
        self._in_force.append(patch)
        self.on_undo(patch.undo)

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have `action`, which is about our own state, called when the changes are taken back."""
        self._undo.append(action)

    def __iter__(self) -> Iterator[Patch]:
        return iter(tuple(self._in_force))

    def undo(self) -> None:
        """Take every change back, last first."""
        self._in_force.clear()
        while self._undo:
            self._undo.pop()()


class PatchGroup:
    """Makes changes and notes them.

    Args:
        patches: Where they are noted.
        reason: Why they are needed.
    """

    def __init__(self, patches: Patches, reason: str) -> None:
        self._patches, self._reason = patches, reason

    def replace(self, holder: Any, name: str, new: Any, effect: str = "") -> Any:
        """Set ``holder.name`` to `new`.

        Args:
            holder: A module, a class or an object.
            name: Of the attribute.
            new: Its value while the change is in force.
            effect: What `new` does; without it the first line of its docstring says so.

        Returns:
            What ``holder.name`` was before.
        """
        before, own = getattr(holder, name), vars(holder).get(name, _ABSENT)

        def restore() -> None:
            if own is _ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, own)

        if isinstance(new, types.FunctionType) and not hasattr(new, "__wrapped__"):
            _call_alike(new, holder, name)
        setattr(holder, name, new)
        self.note(f"{_name_of(holder)}.{name}", effect or _first_line(new, before), restore)
        return before

    def replace_all(self, holder: Any, functions: Mapping[str, Any]) -> None:
        """`replace` for each name that `holder` has: versions of PyTorch differ in them."""
        for name, function in functions.items():
            if hasattr(holder, name):
                self.replace(holder, name, function)

    def put(self, mapping: MutableMapping[Any, Any], key: Hashable, value: Any, target: str, effect: str) -> None:
        """Set an entry of a table of another library; `target` is the table's dotted name."""
        before = mapping.get(key, _ABSENT)

        def restore() -> None:
            if before is _ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = before

        mapping[key] = value
        self.note(target, effect, restore)

    def note(self, target: str, effect: str, undo: Callable[[], None]) -> None:
        """Note a change that has been made already."""
        self._patches.note(Patch(target, effect, self._reason, undo))

    def when_imported(self, name: str, change: Callable[[types.ModuleType], None]) -> None:
        """Call ``change(module)`` now if module `name` is imported, otherwise right after its import."""
        withdraw = import_hook.when_imported(name, change)
        if import_hook.imported(name) is None:
            self.note("sys.meta_path", f"Waits for the import of {name}.", withdraw)


def _name_of(holder: Any) -> str:
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    return str(holder.__name__)


def _call_alike(new: types.FunctionType, holder: Any, name: str) -> None:
    """Give a function the name under which it is found, by which pickles refer to it."""
    prefix = f"{holder.__qualname__}." if isinstance(holder, type) else ""
    new.__module__ = holder.__module__ if isinstance(holder, type) else holder.__name__
    new.__name__, new.__qualname__ = name, prefix + name


def _first_line(new: Any, before: Any) -> str:
    text = inspect.getdoc(new)
    if not text or text == inspect.getdoc(before):
        raise TypeError(f"{new!r} needs a docstring of its own, or an effect")
    return text.partition("\n")[0]


_REGISTRIES: weakref.WeakSet[Patches] = weakref.WeakSet()


def _undo_in_child() -> None:
    for patches in tuple(_REGISTRIES):
        patches.undo()


os.register_at_fork(after_in_child=_undo_in_child)  # processes that a script forks (loader workers) are its own
