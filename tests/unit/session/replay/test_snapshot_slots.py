"""Two slots: one is written while the other has the last complete copy."""

from __future__ import annotations

from moreh_ap.runtime.recovery.copy_memory import DISK_SLOTS
from moreh_ap.session.replay.snapshot_slots import SnapshotSlots


def test_the_slot_with_the_last_complete_copy_is_not_written():
    slots = SnapshotSlots()
    first, again = slots.next_copy(40, 9.0), slots.next_copy(40, 9.0)
    assert first.slot == again.slot and again.number > first.number, "whether the first was written is not known"
    assert (first.most_bytes, first.most_s) == (40, 9.0)
    restore = slots.completed(again)
    assert (restore.slot, restore.number) == (again.slot, again.number)
    others = [slots.next_copy(40, 9.0) for _ in range(2)]
    assert all(one.slot != again.slot for one in others)
    slots.completed(others[1])
    assert slots.next_copy(40, 9.0).slot == again.slot


def test_other_slots_are_used_where_the_first_have_no_room():
    slots = SnapshotSlots()
    assert slots.next_copy(40, 9.0).slot not in DISK_SLOTS
    slots.move()
    for number in (*DISK_SLOTS, *DISK_SLOTS):
        copy = slots.next_copy(40, 9.0)
        assert copy.slot == number and slots.completed(copy).slot == slots.complete == number
