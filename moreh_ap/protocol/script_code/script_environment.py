"""Variables of the environment that the script sets after its workers were started, such as ``KERAS_BACKEND``.

Decides which of them workers get. Must not know when they are sent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_OF_EACH_PROCESS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TMPDIR"}
_BEGIN_OF_EACH_PROCESS = ("CUDA_", "MOREH_", "HYPERACTOR_", "MONARCH_", "PYTEST_")
"""What a process has for itself: its place among others, its device, and what the engine reads."""


class ScriptEnvironment:
    """The environment as the workers know it.

    Args:
        known: The variables with which they were started.

    Example:
        >>> environment = ScriptEnvironment({"HOME": "/root"})
        >>> environment.news({"HOME": "/root", "KERAS_BACKEND": "torch", "RANK": "0"})
        (('KERAS_BACKEND', 'torch'),)
        >>> environment.news({"HOME": "/root", "KERAS_BACKEND": "torch"})
        ()
    """

    def __init__(self, known: Mapping[str, str] = os.environ) -> None:
        self._known = dict(known)

    def news(self, present: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
        """Returns the variables that were set or changed since this was asked."""
        changed = {name: value for name, value in present.items() if self._known.get(name) != value}
        self._known.update(changed)
        return tuple(
            (name, value)
            for name, value in sorted(changed.items())
            if name not in _OF_EACH_PROCESS and not name.startswith(_BEGIN_OF_EACH_PROCESS)
        )
