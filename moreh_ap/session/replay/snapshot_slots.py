"""The slots in which workers keep copies of what they hold: one of them at a time has a complete copy.

Decides which slot is written next. Must not know where it lies (`runtime/recovery/copy_memory.py`), nor what is in a
copy.
"""

from __future__ import annotations

import itertools

from moreh_ap.protocol.messages.snapshots import RestoreSnapshot, TakeSnapshot
from moreh_ap.runtime.recovery.copy_memory import DISK_SLOTS, MEMORY_SLOTS


class SnapshotSlots:
    """Which slot has what.

    Attributes:
        complete: Which one has the last complete copy; None before there is one.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self.complete: int | None = None
        self._slots = MEMORY_SLOTS

    def move(self) -> None:
        """Has the slots be used from now on that may be on disk; none is complete."""
        self._slots, self.complete = DISK_SLOTS, None

    def next_copy(self, most_bytes: int, most_s: float) -> TakeSnapshot:
        """Returns what has workers write into a slot without a complete copy.

        Args:
            most_bytes: Of a worker's copy.
            most_s: Seconds that it may take.
        """
        free = next(slot for slot in self._slots if slot != self.complete)
        return TakeSnapshot(free, next(self._numbers), most_bytes, most_s)

    def completed(self, copy: TakeSnapshot) -> RestoreSnapshot:
        """Returns what restores a copy that all workers have written; the one before it can be overwritten."""
        assert isinstance(copy.slot, int), "by `next_copy`"
        self.complete = copy.slot
        return RestoreSnapshot(copy.slot, copy.number)
