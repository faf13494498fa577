"""The virtual accelerator: while one is in force, "cuda" in this process means all devices together.

Holds which accelerator is in force. Must not know how one is made: `moreh_ap.accelerator` makes it and puts it here.
"""

from __future__ import annotations

import os
from typing import Any, Protocol


class AcceleratorInForce(Protocol):
    """What this package needs of an accelerator."""

    session: Any

    def close(self) -> None:
        """Take all patches back and end the workers."""


_current: AcceleratorInForce | None = None


def put_in_force(accelerator: AcceleratorInForce) -> None:
    """From now on `accelerator` is the one of this process."""
    global _current
    _current = accelerator


def disable() -> None:
    """End the workers and give "cuda" its ordinary meaning back. Tensors left on the accelerator are lost."""
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
