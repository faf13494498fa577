"""The virtual accelerator: while it is enabled, "cuda" in this process means all devices together.

Holds the accelerator of this process. Must not know how it is made: `moreh_ap.accelerator` makes and registers it.
"""

from __future__ import annotations

import os
from typing import Any, Protocol


class AcceleratorInForce(Protocol):
    """The interface of an accelerator that this package needs."""

    session: Any

    def close(self) -> None:
        """Undoes all patches and ends the workers."""


_current: AcceleratorInForce | None = None


def put_in_force(accelerator: AcceleratorInForce) -> None:
    """Makes `accelerator` the accelerator of this process."""
    global _current
    _current = accelerator


def disable() -> None:
    """Ends the workers and gives "cuda" its ordinary meaning back. Tensors left on the accelerator are lost."""
    global _current
    if _current is not None:
        accelerator, _current = _current, None
        accelerator.close()


def current() -> Any:
    """Returns the `moreh_ap.accelerator.Accelerator` of this process; None before the one line and after `disable`."""
    return _current


def _forget_in_child() -> None:
    global _current
    _current = None  # a forked child has neither workers nor patches


os.register_at_fork(after_in_child=_forget_in_child)
