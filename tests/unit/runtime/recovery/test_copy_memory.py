"""Memory for copies: of this process, as much of it as may be taken, and gone with it."""

from __future__ import annotations

import os

from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER
from moreh_ap.runtime.recovery import copy_memory
from moreh_ap.runtime.recovery.copy_memory import CopyMemory, most_copy_bytes


def test_two_slots_are_there_until_they_are_closed(monkeypatch):
    monkeypatch.setattr(copy_memory, "free_memory", lambda: 1000)
    memory = CopyMemory(num_workers=5)
    assert memory.most_bytes() == most_copy_bytes(1000, 5) == 40, "of two slots of five workers, 0.4 of what is free"
    files = memory.files
    assert len(set(files)) == 2 and files == memory.files
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
    stale, kept = memory.files
    os.pwrite(kept.descriptor, b"kept", 0)
    os.pwrite(stale.descriptor, b"stale", 0)
    memory.for_others(4, kept=1)
    assert memory.num_bytes >= 4096, "that of the copy counts as free: others may be written there"
    assert memory.files == (stale, kept) and memory.most_bytes() == most_copy_bytes(1000 + memory.num_bytes, 4)
    assert os.pread(stale.descriptor, 5, 0) == bytes(5), "its memory was given back"
    assert os.pread(kept.descriptor, 4, 0) == b"kept"
    assert all(os.fstat(one.descriptor).st_size == 4 * BYTES_PER_WORKER for one in memory.files)
    memory.for_others(1, kept=0)
    assert os.pread(kept.descriptor, 4, 0) == bytes(4)
    memory.close()
