"""Two slots: one is written while the other has the last complete copy."""

from __future__ import annotations

from moreh_ap.protocol.messages.memory_files import MemoryFile
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


def test_files_are_slots_in_place_of_numbers():
    slots = SnapshotSlots()
    slots.next_copy(40, 9.0)
    files = MemoryFile(1, 2, "a"), MemoryFile(1, 3, "b")
    slots.move_to(files)
    first = slots.next_copy(40, 9.0)
    assert first.slot == files[0] and slots.completed(first).slot == files[0] and slots.complete == 0
    second = slots.next_copy(40, 9.0)
    assert second.slot == files[1] and slots.completed(second).slot == files[1] and slots.complete == 1
