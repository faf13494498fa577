"""What is written into a slot is read again, all of it or nothing."""

from __future__ import annotations

import os

import pytest
import torch

from moreh_ap.local.local_disk import DiskFolder
from moreh_ap.protocol.messages.memory_files import MemoryFile
from moreh_ap.runtime.worker.snapshots.slot_memory import SlotMemory

STARTS = [0, 1 << 40]


@pytest.fixture
def file():
    name = "moreh-snapshot-of-a-test"
    descriptor = os.memfd_create(name)
    os.truncate(descriptor, 1 << 41)
    yield MemoryFile(os.getpid(), descriptor, name)
    os.close(descriptor)


@pytest.mark.parametrize("start", STARTS)
def test_a_copy_is_read_as_it_was_written_and_grows(file, start):
    writer, other = SlotMemory(file, start), SlotMemory(file, STARTS[start == 0])
    other.write(7, b"of another worker", [torch.ones(3, dtype=torch.uint8)])
    for number, size in ((1, 5), (2, 100_000), (3, 0)):
        values = [torch.arange(size, dtype=torch.int32).view(torch.uint8), torch.full((3,), 9, dtype=torch.uint8)]
        writer.write(number, b"what it is", values)
        description, found = SlotMemory(file, start).read(number)
        assert description == b"what it is"
        assert len(found) == 2 and all(map(torch.equal, found, values))
    assert other.read(7)[0] == b"of another worker"


def test_a_copy_that_was_broken_off_is_not_there(file):
    slot = SlotMemory(file, 0)
    slot.write(1, b"whole", [torch.ones(8, dtype=torch.uint8)])

    with pytest.raises(ValueError, match="snapshot 2 is not there"):
        slot.read(2)
    with pytest.raises(RuntimeError):
        slot.write(2, b"half", [torch.ones(8, dtype=torch.uint8), torch.ones(8, dtype=torch.uint8, device="meta")])
    for number in (1, 2):
        with pytest.raises(ValueError, match=f"snapshot {number} is not there"):
            slot.read(number)


def test_another_file_under_the_same_descriptor_is_not_taken_for_it(file):
    with pytest.raises(FileNotFoundError, match="another"):
        SlotMemory(file._replace(name="another"), 0)


def test_a_file_on_disk_that_has_no_path_any_more_is_a_slot(tmp_path):
    descriptor = DiskFolder(str(tmp_path), 0).unnamed_file("moreh-snapshot-on-disk")
    os.truncate(descriptor, 1 << 20)
    file = MemoryFile(os.getpid(), descriptor, "moreh-snapshot-on-disk", 1 << 19)
    slot = SlotMemory(file, 0)
    slot.write(1, b"what it is", [torch.ones(8, dtype=torch.uint8)])
    assert SlotMemory(file, 0).read(1)[0] == b"what it is" and list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="File too large"):  # the part of the next worker begins there
        slot.write(2, b"what it is", [torch.ones(1 << 19, dtype=torch.uint8)])
    with pytest.raises(FileNotFoundError, match="another"):
        SlotMemory(file._replace(name="another"), 0)
    os.close(descriptor)
