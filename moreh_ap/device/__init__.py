"""The virtual accelerator: from `enable` on, "cuda" in this process means all devices together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moreh_ap.device.accelerator import Accelerator
    from moreh_ap.option import Options

_current: Accelerator | None = None


def enable(options: Options) -> None:
    """Make "cuda" mean an accelerator with these options; with the same options again, nothing happens.

    Raises:
        OptionError: If an accelerator with other options is in use already.
    """
    global _current
    from moreh_ap.device.accelerator import Accelerator
    from moreh_ap.errors import OptionError

    if _current is not None:
        if _current.options == options:
            return
        if _current.in_use():
            raise OptionError(
                f"The accelerator is in use with {_current.options}; it cannot take other options now.",
                allowed="One call, or further calls with the same arguments, before the accelerator is used.",
                fix="torch.moreh.option.enable_advanced_parallelization(...)  # once, before the first model call",
            )
        disable()
    _current = Accelerator(options)


def disable() -> None:
    """End the workers and give "cuda" its ordinary meaning back. Tensors left on the accelerator are lost."""
    global _current
    if _current is not None:
        accelerator, _current = _current, None
        accelerator.close()


def current() -> Accelerator | None:
    """The accelerator of this process, if the one line has been called."""
    return _current


def _forget_in_child() -> None:
    global _current
    _current = None  # a forked child has neither workers nor redirections


os.register_at_fork(after_in_child=_forget_in_child)
