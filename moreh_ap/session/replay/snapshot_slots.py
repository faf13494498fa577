"""The slots in which workers keep copies of what they hold: one of them at a time has a complete copy.

Decides which slot is written next. Must not know where it lies (`runtime/recovery/copy_memory.py`), nor what is in a
copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.protocol.messages.snapshots import RestoreSnapshot, TakeSnapshot
from moreh_ap.runtime.recovery.copy_memory import NUM_SLOTS


class SnapshotSlots:
    """Which slot has what.

    Attributes:
        complete: Which one has the last complete copy; None before there is one.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.complete: int | None = None
        self._slots: Sequence[int | MemoryFile] = range(NUM_SLOTS)

    def move_to(self, files: Sequence[MemoryFile]) -> None:
        """Has files be the slots, of which none is complete, in place of those that workers know by number."""
        self._slots, self.complete = files, None

    def next_copy(self, most_bytes: int, most_s: float) -> TakeSnapshot:
        """Returns what has workers write into a slot without a complete copy.

        Args:
            most_bytes: Of a worker's copy.
            most_s: Seconds that it may take.
        """
        free = next(slot for slot in range(NUM_SLOTS) if slot != self.complete)
        return TakeSnapshot(self._slots[free], next(self._numbers), most_bytes, most_s)

    def completed(self, copy: TakeSnapshot) -> RestoreSnapshot:
        """Returns what restores a copy that all workers have written; the one before it can be overwritten."""
        self.complete = self._slots.index(copy.slot)
        return RestoreSnapshot(copy.slot, copy.number)
