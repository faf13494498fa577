"""The memory in which workers keep copies of what they hold: slots in a process that outlives them.

Decides how large a copy may be, and that nothing of it is left when the process ends, whatever way that happens. Must
not know what is in a copy, nor torch: it is memory of the script's process on one machine, of the agent on each of
several hosts.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Protocol

from moreh_ap.local.memory_limit import free_memory
from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER, MemoryFile

NUM_SLOTS = 2
"""One has the last complete copy while the other is written."""

SHARE = 0.4
"""Of the free memory of a machine, all slots together."""

_numbers = itertools.count(1)


class CopyKeeper(Protocol):
    """Who keeps the copies of all workers of a group."""

    def most_bytes(self) -> int:
        """Returns the bytes that a worker's copy may have; 0 where no memory outlives a worker."""

    def close(self) -> None:
        """Gives the memory back."""


class CopyMemory:
    """Memory of this process, for workers of this machine. Implements `CopyKeeper`.

    Args:
        num_workers: How many workers there are, by whose rank their parts of a slot are found.

    Attributes:
        num_workers: The same.
        kept: The slot of which others need what there is, since there are so many; None: none of them.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.kept: int | None = None
        self._files: tuple[MemoryFile, ...] | None = None
        self._lock = threading.Lock()

    @property
    def files(self) -> tuple[MemoryFile, ...]:
        """The slots, made when they are asked for first; none where the system has no such memory."""
        with self._lock:
            if self._files is None:
                self._files = self._made()
            return self._files

    def for_others(self, num_workers: int, kept: int | None) -> None:
        """Has another number of workers write from now on.

        Args:
            num_workers: How many.
            kept: The slot of which they need what there is.
        """
        self.num_workers, self.kept = num_workers, kept
        for slot, file in enumerate(self.files):
            if slot != kept:
                os.truncate(file.descriptor, 0)  # gives back what others have written
            if os.fstat(file.descriptor).st_size < num_workers * BYTES_PER_WORKER:
                os.truncate(file.descriptor, num_workers * BYTES_PER_WORKER)

    @property
    def num_bytes(self) -> int:
        """Memory that copies take."""
        return sum(os.fstat(file.descriptor).st_blocks * 512 for file in self.files)

    def most_bytes(self) -> int:
        return most_copy_bytes(free_memory() + self.num_bytes, self.num_workers) if self.files else 0

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files or (), ()
        for file in files:
            os.close(file.descriptor)

    def _made(self) -> tuple[MemoryFile, ...]:
        if sys.platform != "linux":
            return ()
        files: list[MemoryFile] = []
        for _ in range(NUM_SLOTS):
            name = f"moreh-snapshot-{next(_numbers)}"
            descriptor = os.memfd_create(name)
            files.append(MemoryFile(os.getpid(), descriptor, name))
            try:
                os.truncate(descriptor, self.num_workers * BYTES_PER_WORKER)
            except OSError:  # the user's limit on the size of files
                for file in files:
                    os.close(file.descriptor)
                return ()
        return tuple(files)


def most_copy_bytes(free_bytes: int, num_workers: int) -> int:
    """Returns the bytes that the copy of one of so many workers may have, on a machine with so much free memory."""
    return int(SHARE * free_bytes) // (NUM_SLOTS * num_workers)
