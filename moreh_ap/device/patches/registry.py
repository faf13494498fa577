"""The changes that the one line makes to other people's modules: each is undoable, and all are undone together.

Nothing else in this package assigns to attributes of PyTorch. In a forked child (a loader worker) the changes are
undone at once: processes that a script starts are its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Patches:
    """The changes in force; `undo` restores what was there before."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, holder: Any, name: str, new: Any) -> Any:
        """Set ``holder.name`` to `new`; returns what was there."""
        own = name in vars(holder)
        before = getattr(holder, name)
        setattr(holder, name, new)
        self._undo.append(lambda: setattr(holder, name, before) if own else delattr(holder, name))
        return before

    def on_undo(self, action: Callable[[], None]) -> None:
        """Have `action` called when the changes are taken back."""
        self._undo.append(action)

    def undo(self) -> None:
        """Take every change back, last first."""
        while self._undo:
            self._undo.pop()()


class _ForkHook:
    """Undoes the changes in a forked child."""

    def __init__(self) -> None:
        self.current: Patches | None = None
        os.register_at_fork(after_in_child=self._in_child)

    def _in_child(self) -> None:
        if self.current is not None:
            self.current.undo()


FORK_HOOK = _ForkHook()
