"""Two slots: one is written while the other has the last complete copy."""

from __future__ import annotations

import os

from moreh_ap.protocol.messages.state import BYTES_PER_WORKER
from moreh_ap.session.replay import snapshot_slots
from moreh_ap.session.replay.snapshot_slots import SnapshotSlots


def test_the_slot_with_the_last_complete_copy_is_not_written(monkeypatch):
    monkeypatch.setattr(snapshot_slots, "free_memory", lambda: 1000)
    slots = SnapshotSlots(num_workers=5)
    first, again = slots.next_copy(9.0), slots.next_copy(9.0)
    assert first.file == again.file and again.number > first.number, "nobody knows whether the first was written"
    assert first.most_bytes == 40, "of two slots of five workers, 0.4 of what is free"
    restore = slots.completed(again)
    assert (restore.file, restore.number) == (again.file, again.number)
    others = [slots.next_copy(9.0) for _ in range(2)]
    assert all(one.file != again.file for one in others)
    slots.completed(others[1])
    assert slots.next_copy(9.0).file == again.file
    slots.close()


def test_nothing_is_left_once_the_slots_are_closed():
    slots = SnapshotSlots(num_workers=2)
    descriptor = slots.next_copy(9.0).file.descriptor
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:moreh-snapshot-")
    slots.close()
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")


def test_no_slots_where_files_must_not_be_large(monkeypatch):
    def refuse(*unused):
        raise OSError(27, "File too large")

    monkeypatch.setattr(snapshot_slots.os, "truncate", refuse)
    assert SnapshotSlots(num_workers=2).next_copy(9.0) is None


def test_other_workers_write_beside_the_copy_of_those_before_them(monkeypatch):
    monkeypatch.setattr(snapshot_slots, "free_memory", lambda: 1000)
    slots = SnapshotSlots(num_workers=2)
    copy = slots.next_copy(9.0)
    os.pwrite(copy.file.descriptor, b"kept", 0)
    slots.completed(copy)
    stale = slots.next_copy(9.0)
    os.pwrite(stale.file.descriptor, b"stale", 0)
    slots.for_others(4)
    following = slots.next_copy(9.0)
    assert following.file == stale.file and following.most_bytes == 50
    assert os.pread(stale.file.descriptor, 5, 0) == bytes(5), "its memory was given back"
    assert os.pread(copy.file.descriptor, 4, 0) == b"kept"
    assert os.fstat(following.file.descriptor).st_size == 4 * BYTES_PER_WORKER
    slots.close()
