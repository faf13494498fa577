"""Files that a process has open and workers of its machine write into, in memory or on disk. Must not know torch:
agents do not."""

from __future__ import annotations

from typing import NamedTuple

BYTES_PER_WORKER = 1 << 40
"""In a `MemoryFile`, worker 1 writes from here on, worker 2 from twice this; only what is written takes memory."""


class MemoryFile(NamedTuple):
    """A file without a path that a process of this machine has open: in memory, or on disk.

    Attributes:
        process: The process.
        descriptor: Its descriptor there.
        name: Its own name, by which it is told from another one that has that descriptor later.
        bytes_per_worker: Where the part of each next worker begins.
    """

    process: int
    descriptor: int
    name: str
    bytes_per_worker: int = BYTES_PER_WORKER
