"""The environment variables that Monarch reads, and sets, while it is imported.

Decides their values, and when they are in the environment of this process. Must not import Monarch.

[Note: environment and threads]
The C library moves its array of variables when one is added. A thread that looks one up at that moment reads freed
memory, and the process ends by signal 11; the first matrix product of a process looks up dozens. So the thread that
asks for workers, normally the script's, adds the variables before another thread imports Monarch. Taking a variable
away, or giving it another value, moves nothing.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from types import MappingProxyType

# Read once, when Monarch is imported in a process. Poll frequency: a lost process is noticed within a second, not ten.
# Orphan time-out: a suspended laptop must not lose its mesh; local workers die with their parent through the kernel.
_SETTINGS = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "24h",
    "MONARCH_FILE_LOG": "error",
}
_IDENTIFIERS = ("HYPERACTOR_EXECUTION_ID", "MONARCH_CLIENT_TRACE_ID")
"""Monarch adds them itself, in whatever thread imports it, where they have no value."""

_run = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
_before: dict[str, str | None] | None = None


def add(further: Mapping[str, str] = MappingProxyType({})) -> None:
    """Adds the variables until `take_away` is called. Does nothing once Monarch has been imported with them.

    Args:
        further: More of them.
    """
    global _before
    if _before is not None:
        return
    variables = {**of_worker(), **further}
    _before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)


def take_away() -> None:
    """Gives the environment what it had before `add`, so that the script's child processes inherit none of it."""
    global _before
    before = _before or {}
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    before.clear()
    if "monarch" not in sys.modules:  # the workers were closed before they needed it: others will
        _before = None


def of_worker() -> dict[str, str]:
    """Returns the variables for a worker process, in which Monarch is imported while another thread imports PyTorch."""
    return {**dict.fromkeys(_IDENTIFIERS, _run), **_SETTINGS}
