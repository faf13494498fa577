"""The processes that a process has started, and those that these have started.

Decides which of them are ended, and in which order. Must not know what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def end_descendants(warm_parent: int | None = None) -> int:
    """Ends the processes that this one has started, and all that they started; returns how many lived.

    Args:
        warm_parent: What forks workers, and goes on; None: it ends, too. Copies of it that go on in its place are in
            its process group, in which no worker is.
    """
    kept: set[int] = set()
    if warm_parent is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended: workers start anew
            group = os.getpgid(warm_parent)
            kept = {pid for pid in (warm_parent, *descendants(warm_parent)) if _group_of(pid) == group}
    doomed = [pid for pid in reversed(descendants(os.getpid())) if pid not in kept and _lives(pid)]
    for pid in doomed:  # workers before the warm parent, with which they would be gone
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
    return len(doomed)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _lives(pid: int) -> bool:
    """Returns whether a process has not ended, collected or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Returns the ids of a process's children and theirs: workers are children of the warm parent."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found
