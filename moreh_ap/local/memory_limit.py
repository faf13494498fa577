"""How much memory processes on this machine may use.

Decides between the machine's memory and a container's limit. Must not know torch: command-line tools ask too.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def memory_limit() -> int:
    """Returns the bytes of memory that processes here may use: the machine's, or a container's limit.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst, memory.max.
    """
    total = int(psutil.virtual_memory().total)
    try:
        text = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdigit() else total


def free_memory() -> int:
    """Returns the bytes of memory that are free: of the machine's, or of what a container may use."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
        used = int(_CGROUP_LIMIT.with_name("memory.current").read_text(encoding="ascii"))
    except OSError:
        return available
    return min(available, max(0, int(limit) - used)) if limit.isdigit() else available
