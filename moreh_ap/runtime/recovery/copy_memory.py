"""The memory in which workers keep copies of what they hold: slots in a process that outlives them.

Decides how large a copy may be, whether slots lie on disk for want of memory, and that nothing of it is left when the
process ends, whatever way that happens. Must not know what is in a copy, nor torch: it is memory of the script's
process on one machine, of the agent on each of several hosts.

[Note: room for copies]
Each worker's copy may have an equal share of what all may take. Some plans need less of others: replicas are each
other's copy, so that one worker writes what several hold, and the last stage of a pipeline may hold more than the
first. So a copy that is larger is measured again: where all of them together fit, twice, it may be as large as it is.
Where they do not, the slots are files on the local disk without a name, which the system removes with the process; it
needs no memory for what is written there, once that is on the disk. Where there is no room either, there are no copies.

A command that has workers write a copy is the same for all hosts, and names a slot by its number. So there are other
numbers for slots on disk, whose descriptors are there from the beginning, for a file that is put there if it is needed:
workers have not opened them before. A host among several that has room in its memory keeps these slots there.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from typing import Protocol

from moreh_ap.local.local_disk import DiskFolder, disk_folder
from moreh_ap.local.memory_limit import free_memory
from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER, MemoryFile

NUM_SLOTS = 2
"""One has the last complete copy while the other is written."""

MEMORY_SLOTS = range(NUM_SLOTS)
"""The numbers of those that are used first."""

DISK_SLOTS = range(NUM_SLOTS, 2 * NUM_SLOTS)
"""Of those in their place where one machine or host has no room for copies in memory."""

SHARE = 0.4
"""Of the free memory of a machine, or of its disk, all slots together."""

DISK_BYTES_PER_WORKER = 1 << 36
"""Of a slot on disk: a file has 16 TiB at most on ext4. Source: Linux, Documentation/filesystems/ext4."""

_numbers = itertools.count(1)


class CopyKeeper(Protocol):
    """Who keeps the copies of all workers of a group."""

    def most_bytes(self) -> int:
        """Returns the bytes that a worker's copy may have; 0 where no memory outlives a worker."""

    def fits(self, num_bytes: int) -> bool:
        """Returns whether there is room for slots in which the copies of all workers have so many bytes."""

    def move_to_disk(self, num_bytes: int, largest_bytes: int) -> tuple[bool, str]:
        """Has `DISK_SLOTS` be on disk, to be used from now on, where there is no room for copies in memory.

        Called where there is no complete copy.

        Args:
            num_bytes: Of the copies of all workers.
            largest_bytes: Of the largest of them.

        Returns:
            Whether they have room; and why they are on disk, or why there is no room.
        """

    def close(self) -> None:
        """Gives the memory back."""


class CopyMemory:
    """Memory of this process, for workers of this machine. Implements `CopyKeeper`.

    Args:
        num_workers: How many workers there are, by whose rank their parts of a slot are found.

    Attributes:
        num_workers: The same.
        kept: The slot of which others need what there is, since there are so many; None: none of them.
        on_each_host_bytes: For which the agents of several hosts have been asked for room; 0 before.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.kept: int | None = None
        self.on_each_host_bytes = 0
        self._files: tuple[MemoryFile, ...] | None = None
        self._used = MEMORY_SLOTS
        self._disk: DiskFolder | None = None
        self._lock = threading.Lock()

    @property
    def files(self) -> tuple[MemoryFile, ...]:
        """All slots, made when they are asked for first; none where the system has no such memory."""
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
            if os.fstat(file.descriptor).st_size < num_workers * file.bytes_per_worker:
                os.truncate(file.descriptor, num_workers * file.bytes_per_worker)

    def most_bytes(self) -> int:
        if not self.files:
            return 0
        return min(most_copy_bytes(self.room(), self.num_workers), self.files[self._used[0]].bytes_per_worker)

    def fits(self, num_bytes: int) -> bool:
        return bool(self.files) and NUM_SLOTS * num_bytes <= SHARE * self.room()

    def room(self) -> int:
        """Returns the bytes that are free where the slots are, with what the slots have taken."""
        if self._used == DISK_SLOTS and self._disk is not None:
            return self._disk.now_free_bytes() + self._taken()
        return free_memory() + self._taken()

    def move_to_disk(self, num_bytes: int, largest_bytes: int) -> tuple[bool, str]:
        in_memory = f"{_share_of(free_memory())} of memory"
        need = f"two need {in_words(NUM_SLOTS * num_bytes)}"
        if self._used == DISK_SLOTS:
            return (
                False,
                f"{need}, and may take {_share_of(self.room())} of {'memory' if self._disk is None else 'disk'}",
            )
        disk = disk_folder()
        if disk is None:
            return False, f"{need}, and may take {in_memory}; there is no folder for temporary files on a local disk"
        if NUM_SLOTS * num_bytes > SHARE * disk.free_bytes:
            on_disk = f"{_share_of(disk.free_bytes)} of disk in {disk.path}"
            return False, f"{need}, and may take {in_memory}, or {on_disk}"
        try:
            self._open_on_disk(disk)
        except OSError as error:
            return False, f"{need}, and may take {in_memory}; in {disk.path}: {error.strerror}"
        self._use(DISK_SLOTS)
        return True, f"{need}, more than {in_memory}, and are files in {disk.path}"

    def make_room(self, num_bytes: int) -> tuple[bool, str]:
        """Has `DISK_SLOTS` be used from now on, as another host needs it: in memory where it has room, else on disk.

        Args:
            num_bytes: Of all copies in a slot; 0: has the others be used as before, since not all hosts have room.

        Returns:
            Whether there is room; and why they are on disk, or why there is none; empty for memory.
        """
        if num_bytes and not self.fits(num_bytes):
            return self.move_to_disk(num_bytes, num_bytes)
        self._use(DISK_SLOTS if num_bytes else MEMORY_SLOTS)
        return True, ""

    def close(self) -> None:
        with self._lock:
            files, self._files = self._files or (), ()
        for file in files:
            os.close(file.descriptor)

    def _use(self, slots: range) -> None:
        """Has slots be used from now on; what was begun in others is dropped."""
        self._used = slots
        for slot, file in enumerate(self.files):
            if slot not in slots:
                os.truncate(file.descriptor, 0)
                os.truncate(file.descriptor, self.num_workers * file.bytes_per_worker)

    def _taken(self) -> int:
        used = self.files[self._used.start : self._used.stop]
        return sum(os.fstat(file.descriptor).st_blocks * 512 for file in used)

    def _open_on_disk(self, disk: DiskFolder) -> None:
        opened: list[int] = []
        try:
            for slot in DISK_SLOTS:
                opened.append(disk.unnamed_file(self.files[slot].name))
                os.truncate(opened[-1], self.num_workers * DISK_BYTES_PER_WORKER)
            for slot, descriptor in zip(DISK_SLOTS, opened):
                os.dup2(descriptor, self.files[slot].descriptor, inheritable=False)
        finally:  # also where the file system, or the user's limit, has no files of that size
            for descriptor in opened:
                os.close(descriptor)
        self._disk = disk

    def _made(self) -> tuple[MemoryFile, ...]:
        if sys.platform != "linux":
            return ()
        files: list[MemoryFile] = []
        for bytes_per_worker in (BYTES_PER_WORKER,) * NUM_SLOTS + (DISK_BYTES_PER_WORKER,) * NUM_SLOTS:
            name = f"moreh-snapshot-{os.getpid()}-{next(_numbers)}"
            descriptor = os.memfd_create(name)
            files.append(MemoryFile(os.getpid(), descriptor, name, bytes_per_worker))
            try:
                os.truncate(descriptor, self.num_workers * bytes_per_worker)
            except OSError:  # the user's limit on the size of files
                for file in files:
                    os.close(file.descriptor)
                return ()
        return tuple(files)


def in_words(num_bytes: float) -> str:
    """Returns a size as people read it."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"


def _share_of(free_bytes: int) -> str:
    return f"{SHARE:.0%} of the {in_words(free_bytes)} that are free"


def most_copy_bytes(free_bytes: int, num_workers: int) -> int:
    """Returns the bytes that the copy of one of so many workers may have, on a machine with so much free memory."""
    return int(SHARE * free_bytes) // (NUM_SLOTS * num_workers)
