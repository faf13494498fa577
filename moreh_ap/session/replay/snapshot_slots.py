"""The memory in which workers keep copies of what they hold: two slots of the script's process.

Decides which slot is written next, and how large a copy may be. Nothing of it is left when the process ends, whatever
way that happens. Must not know what is in a copy.
"""

from __future__ import annotations

import itertools
import os
import sys

from moreh_ap.local.memory_limit import free_memory
from moreh_ap.protocol.messages.snapshots import RestoreSnapshot, TakeSnapshot
from moreh_ap.protocol.messages.state import BYTES_PER_WORKER, MemoryFile

SHARE = 0.4
"""Of the free memory of this machine, both slots together."""

_numbers = itertools.count(1)


class SnapshotSlots:
    """Two slots, of which one at a time has a complete copy.

    Args:
        num_workers: How many workers write into each.

    Attributes:
        num_workers: How many.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._files: list[MemoryFile] = []
        self._complete: tuple[MemoryFile, int] | None = None
        self._most_bytes = 0

    def next_copy(self, most_s: float) -> TakeSnapshot | None:
        """Returns what has workers write into the slot without a complete copy; None where there are no slots.

        Args:
            most_s: Seconds that it may take.
        """
        if not self._files and not self._make():
            return None
        free = next(file for file in self._files if self._complete is None or file != self._complete[0])
        return TakeSnapshot(free, next(_numbers), self._most_bytes, most_s)

    def completed(self, copy: TakeSnapshot) -> RestoreSnapshot:
        """Returns what restores a copy that all workers have written; the one before it can be overwritten."""
        self._complete = copy.file, copy.number
        return RestoreSnapshot(copy.file, copy.number)

    def for_others(self, num_workers: int) -> None:
        """Has another number of workers write from now on. The complete copy stays until they have written one."""
        self.num_workers = num_workers
        for file in self._files:
            if self._complete is None or file != self._complete[0]:
                os.truncate(file.descriptor, 0)  # gives back what others have written
        self._reserve()

    def close(self) -> None:
        """Gives the memory back."""
        for file in self._files:
            os.close(file.descriptor)
        self._files = []

    def _make(self) -> bool:
        if sys.platform != "linux":
            return False
        for _ in range(2):
            name = f"moreh-snapshot-{next(_numbers)}"
            descriptor = os.memfd_create(name)
            self._files.append(MemoryFile(os.getpid(), descriptor, name))
        try:
            self._reserve()
        except OSError:  # the user's limit on the size of files
            self.close()
            return False
        return True

    def _reserve(self) -> None:
        """Makes room for a part of each worker; only what is written takes memory."""
        self._most_bytes = int(SHARE * free_memory()) // (2 * self.num_workers)
        for file in self._files:
            if os.fstat(file.descriptor).st_size < self.num_workers * BYTES_PER_WORKER:
                os.truncate(file.descriptor, self.num_workers * BYTES_PER_WORKER)
