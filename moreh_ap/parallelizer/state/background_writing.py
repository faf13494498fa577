"""A worker's share of a checkpoint, written while training goes on: copied first, then written by a thread.

Decides where the copy lies and how the file says that it is complete. Must not know what the tensors are, or who waits.

[Note: what stops training]
The copy alone: one pass over the elements that this worker writes, into memory that the system has to hand out first.
Huge pages make that part small (a fault for 2 MiB instead of 4 KiB). The thread then uses a core that a step may want.

[Note: a note on a full disk]
A save waits for the note beside a file, also where the disk has no byte left for it: others may have filled it
meanwhile. So the note's name is made before anything is copied, and an empty note says that there was no room for one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import threading
from collections.abc import Sequence

import torch

from moreh_ap.parallelizer.state.checkpoint_files import Box, WrittenFile, write_file

_ALIGNMENT = 64
_SUFFIX = ".written"
_THREAD = "moreh-checkpoint"


def write_in_background(path: str, boxes: Sequence[Box]) -> WrittenFile | None:
    """Copies boxes into host memory and returns; a thread writes them into a file, as `write_file` does.

    Where there is no memory for the copy, the file is written before this returns. Nothing is done
    where a worker that was lost since has written the file.

    Args:
        path: The file. What was written is found by `what_was_written` once it is complete.
        boxes: What to write.

    Returns:
        Why nothing is written, where not even a file for the note can be made; else None.
    """
    if os.path.exists(path + _SUFFIX):
        return None
    try:
        _begin_note(path)
    except OSError as error:
        return _not_written(path, error)
    try:
        copies = _copied(boxes)
    except (MemoryError, OSError):
        _write(path, boxes)
        return None
    threading.Thread(target=_write, args=(path, copies), name=_THREAD).start()
    return None


def is_going_on() -> bool:
    """Returns whether this process writes a file in the background."""
    return any(thread.name == _THREAD for thread in threading.enumerate())


def what_was_written(path: str) -> tuple[bool, WrittenFile | None]:
    """Returns whether a worker is through with the file at `path`, and what it has written, if there was anything."""
    note = path + _SUFFIX
    try:
        with open(note, "rb") as file:
            said = file.read()
    except FileNotFoundError:
        return False, None
    if not said:  # see [Note: a note on a full disk]
        return True, _not_written(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    return True, pickle.loads(said)


def forget_what_was_written(path: str) -> None:
    """Removes the note once all workers have written: a worker that replaces a lost one does not write again."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path + _SUFFIX)


def _write(path: str, boxes: Sequence[Box]) -> None:
    """Writes the file, and beside it what was written or why not: a save waits for that note."""
    try:
        written = write_file(path, boxes)
    except Exception as error:  # of any class: it is raised by the save
        written = _not_written(path, error)
    note = path + _SUFFIX
    try:
        with open(note + "~", "wb") as file:
            pickle.dump(written, file)
    except OSError:  # see [Note: a note on a full disk]
        _begin_note(path)
    os.replace(note + "~", note)


def _begin_note(path: str) -> None:
    with open(path + _SUFFIX + "~", "wb"):
        pass


def _not_written(path: str, error: Exception) -> WrittenFile:
    return WrittenFile(path, 0, "", (), f"{type(error).__name__}: {error}")


def _copied(boxes: Sequence[Box]) -> list[Box]:
    """Returns the same boxes with their elements of now, in one piece of host memory."""
    starts, end = [], 0
    for box in boxes:
        starts.append(end)
        end += -(-box.num_bytes // _ALIGNMENT) * _ALIGNMENT
    memory = mmap.mmap(-1, max(end, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    copies = []
    for box, start in zip(boxes, starts, strict=True):
        copy = buffer[start : start + box.num_bytes].view(box.dtype).view(box.size)
        copy.copy_(box.value().detach())
        copies.append(Box(box.name, box.start, box.size, box.dtype, copy.detach))
    return copies
