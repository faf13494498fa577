"""Files in memory that a process has open and workers of its machine write into. Must not know torch: agents do not."""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_WORKER = 1 << 40
"""In a `MemoryFile`, worker 1 writes from here on, worker 2 from twice this; only what is written takes memory."""


class MemoryFile(NamedTuple):
    """A file in memory that a process of this machine has open: the process, its descriptor there, and its own name."""

    process: int
    descriptor: int
    name: str
