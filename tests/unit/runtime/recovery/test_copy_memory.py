"""Memory for copies: of this process, as much of it as may be taken, and gone with it."""

from __future__ import annotations

import os

import pytest

from moreh_ap.local.local_disk import DiskFolder
from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER
from moreh_ap.runtime.recovery import copy_memory
from moreh_ap.runtime.recovery.copy_memory import CopyMemory, most_copy_bytes


def test_two_slots_are_there_until_they_are_closed(monkeypatch):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1000)
    memory = CopyMemory(num_workers=5)
    assert memory.most_bytes() == most_copy_bytes(1000, 5) == 40, "of two slots of five workers, 0.4 of what is free"
    files = memory.files
    assert len(set(files)) == 4 and files == memory.files, "two of them for want of memory"
    for file in files:
        assert file.process == os.getpid()
        assert os.readlink(f"/proc/self/fd/{file.descriptor}").startswith(f"/memfd:{file.name} ")
        assert os.fstat(file.descriptor).st_blocks == 0, "only what is written takes memory"
    memory.close()
    assert not any(os.path.exists(f"/proc/self/fd/{file.descriptor}") for file in files)
    memory.close()
    assert memory.files == () and memory.most_bytes() == 0


def test_no_slots_where_files_must_not_be_large(monkeypatch):
    def refuse(*unused):
        raise OSError(27, "File too large")

    monkeypatch.setattr(copy_memory.os, "truncate", refuse)
    memory = CopyMemory(num_workers=2)
    assert memory.files == () and memory.most_bytes() == 0


def test_other_workers_write_beside_the_copy_of_those_before_them(monkeypatch):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1000)
    memory = CopyMemory(num_workers=2)
    stale, kept = memory.files[: copy_memory.NUM_SLOTS]
    os.pwrite(kept.descriptor, b"kept", 0)
    os.pwrite(stale.descriptor, b"stale", 0)
    memory.for_others(4, kept=1)
    assert memory.room() >= 1000 + 4096, "that of the copy counts as free: others may be written there"
    assert memory.files[:2] == (stale, kept) and memory.most_bytes() == most_copy_bytes(memory.room(), 4)
    assert os.pread(stale.descriptor, 5, 0) == bytes(5), "its memory was given back"
    assert os.pread(kept.descriptor, 4, 0) == b"kept"
    assert all(os.fstat(one.descriptor).st_size == 4 * one.bytes_per_worker for one in memory.files)
    assert memory.files[0].bytes_per_worker == BYTES_PER_WORKER
    memory.for_others(1, kept=0)
    assert os.pread(kept.descriptor, 4, 0) == bytes(4)
    memory.close()


def test_copies_of_which_some_are_large_fit_where_all_of_them_do(monkeypatch):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1000)
    memory = CopyMemory(num_workers=2)
    assert memory.most_bytes() == 100 and memory.fits(200) and not memory.fits(201)
    memory.close()
    assert not memory.fits(1)


def test_slots_are_on_disk_where_memory_is_short_until_they_are_closed(monkeypatch, tmp_path):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(copy_memory, "disk_folder", lambda: DiskFolder(str(tmp_path), 100 << 20))
    memory = CopyMemory(num_workers=2)
    opened = len(memory.files) and len(os.listdir("/proc/self/fd"))
    has_room, why = memory.move_to_disk(10 << 20, 10 << 20)
    files = [memory.files[slot] for slot in copy_memory.DISK_SLOTS]
    assert len(os.listdir("/proc/self/fd")) == opened, "at the descriptors that workers know"
    assert has_room and (
        why == f"two need 20.0 MiB, more than 40% of the 10.0 MiB that are free of memory, and are files in {tmp_path}"
    )
    assert list(tmp_path.iterdir()) == []
    for file in files:
        assert os.readlink(f"/proc/self/fd/{file.descriptor}") == f"{tmp_path}/{file.name} (deleted)"
        assert os.fstat(file.descriptor).st_size == 2 * copy_memory.DISK_BYTES_PER_WORKER
        assert os.fstat(file.descriptor).st_blocks == 0
    assert memory.fits(10 << 20) and memory.most_bytes() > 10 << 20
    has_room, why = memory.move_to_disk(1 << 60, 1 << 60)
    assert not has_room and why.endswith("of disk")
    os.pwrite(files[1].descriptor, b"kept", 0)
    os.pwrite(files[0].descriptor, b"stale", 0)
    memory.for_others(3, kept=copy_memory.DISK_SLOTS[1])
    assert os.pread(files[1].descriptor, 4, 0) == b"kept" and os.pread(files[0].descriptor, 5, 0) == bytes(5)
    memory.close()
    assert not any(os.path.exists(f"/proc/self/fd/{file.descriptor}") for file in files)


@pytest.mark.parametrize(
    "disk, why",
    [
        (None, "; there is no folder for temporary files on a local disk"),
        (DiskFolder("/a", 20 << 20), ", or 40% of the 20.0 MiB that are free of disk in /a"),
        (DiskFolder("/nowhere", 100 << 20), "; in /nowhere: No such file or directory"),
    ],
)
def test_where_there_is_no_room_on_disk_either_that_is_said(monkeypatch, disk, why):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(copy_memory, "disk_folder", lambda: disk)
    memory = CopyMemory(num_workers=2)
    of_memory = "two need 20.0 MiB, and may take 40% of the 10.0 MiB that are free of memory"
    opened = len(memory.files) and len(os.listdir("/proc/self/fd"))
    assert memory.move_to_disk(10 << 20, 10 << 20) == (False, of_memory + why)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert memory.most_bytes() == 1 << 20, "smaller copies still fit"
    memory.close()


def test_a_host_makes_room_in_its_memory_or_else_on_its_disk_and_has_the_first_slots_again_if_others_cannot(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 10 << 20)
    monkeypatch.setattr(copy_memory, "disk_folder", lambda: DiskFolder(str(tmp_path), 100 << 20))
    memory = CopyMemory(num_workers=2)

    def kinds() -> list[bool]:
        return [os.readlink(f"/proc/self/fd/{one.descriptor}").startswith("/memfd:") for one in memory.files]

    assert memory.make_room(2 << 20) == (True, "") and all(kinds()) and memory.room() == 10 << 20
    has_room, why = memory.make_room(3 << 20)
    assert not has_room and why == "two need 6.0 MiB, and may take 40% of the 10.0 MiB that are free of memory"
    assert memory.make_room(0) == (True, "")
    has_room, why = memory.make_room(10 << 20)
    assert has_room and why.endswith(f"and are files in {tmp_path}") and kinds() == [True, True, False, False]
    assert memory.room() > 10 << 20, "of the disk"
    assert memory.make_room(0) == (True, "") and memory.room() == 10 << 20
    memory.close()
