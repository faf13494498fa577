"""What the kernel says of a process of this machine: whether it is stopped, and how much it has computed.

Must not know what the process does. Linux only: elsewhere nothing is known.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

import psutil

STOPPED, TRACED = "T", "t"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Look(NamedTuple):
    """A process at one moment.

    Attributes:
        state: As in /proc: `STOPPED` by a signal, `TRACED` by a debugger, or another letter.
        processor_s: What it has computed, with processes that it has started and that have ended.
    """

    state: str
    processor_s: float


def look_at(pid: int) -> Look | None:
    """Returns how a process is; None where it is gone, or the system does not tell.

    Source: Linux, Documentation/filesystems/proc.rst, table 1-4: fields 3 and 14 to 17.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return Look(fields[0], sum(map(int, fields[11:15])) / _TICKS_PER_S)


def processor_s_of_children(pid: int) -> float:
    """Returns what the processes have computed that a process has started and that live: compilers, loaders."""
    found = 0.0
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            look = look_at(child.pid)
            found += 0.0 if look is None else look.processor_s
    return found
