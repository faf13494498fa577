"""A worker's part of a file that another process has open, which outlives the worker.

Decides where bytes lie in it, and whether they are all there. Must not know what they mean.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from moreh_ap.protocol.messages.memory_files import MemoryFile

_MAGIC = b"moreh-ap"
_HEADER = struct.Struct("<8sQQQ")  # magic, number of the copy, bytes of the description, number of values
_ALIGNED = 64


class SlotMemory:
    """One slot: a description, and the bytes of tensors behind it. The header is written last.

    Args:
        file: The file, which another process has open.
        start: Where this worker's part begins.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, file: MemoryFile, start: int) -> None:
        descriptor = os.open(f"/proc/{file.process}/fd/{file.descriptor}", os.O_RDWR)
        link = os.readlink(f"/proc/self/fd/{descriptor}")
        if not link.startswith(f"/memfd:{file.name} ") and not link.endswith(f"/{file.name} (deleted)"):
            os.close(descriptor)
            raise FileNotFoundError(file.name)
        self._descriptor, self._start, self._most_bytes = descriptor, start, file.bytes_per_worker
        self._num_reserved, self._begun = 0, (0, 0)
        self._memory: Tensor | None = None

    def close(self) -> None:
        """Closes the file; tensors that were read keep their values."""
        os.close(self._descriptor)
        self._memory = None

    def write(self, number: int, description: bytes, values: Sequence[Tensor]) -> None:
        """Replaces what is there.

        Args:
            number: By which a reader knows it.
            description: What the values are.
            values: Flat tensors of bytes.

        Raises:
            OSError: There is no memory for it.
        """
        for place, value in zip(self.begin(description, [value.numel() for value in values]), values):
            place.copy_(value)
        self.end(number)

    def begin(self, description: bytes, sizes: Sequence[int]) -> list[Tensor]:
        """Begins to replace what is there; returns where each value of these sizes belongs, until `end` is called.

        Raises:
            OSError: There is no memory for it.
        """
        begins, places, end = _places(len(description), sizes)
        memory = self._mapped(end)
        memory[: _HEADER.size].zero_()
        memory[_HEADER.size : _HEADER.size + len(description)] = _as_tensor(description)
        packed = struct.pack(f"={len(sizes)}q", *sizes)
        memory[begins : begins + len(packed)] = _as_tensor(packed)
        self._begun = len(description), len(sizes)
        return [memory[place : place + size] for place, size in zip(places, sizes)]

    def end(self, number: int) -> None:
        """Has all of it be there from now on, under this number."""
        header = _HEADER.pack(_MAGIC, number, *self._begun)
        self._mapped(1)[: _HEADER.size] = _as_tensor(header)

    def has(self, number: int) -> bool:
        """Returns whether there is a copy of this number."""
        header = self._bytes(0, _HEADER.size)
        return len(header) == _HEADER.size and _HEADER.unpack(header)[:2] == (_MAGIC, number)

    def read(self, number: int) -> tuple[bytes, list[Tensor]]:
        """Returns the description, and the values where they lie.

        Raises:
            ValueError: There is no copy of this number.
        """
        magic, found, num_described, num_values = _HEADER.unpack(self._bytes(0, _HEADER.size))
        if magic != _MAGIC or found != number:
            raise ValueError(f"snapshot {number} is not there")
        description = self._bytes(_HEADER.size, num_described)
        begins = _places(num_described, [])[0]
        sizes = list(struct.unpack(f"={num_values}q", self._bytes(begins, 8 * num_values)))
        _, places, end = _places(num_described, sizes)
        memory = self._mapped(end)
        return description, [memory[place : place + size] for place, size in zip(places, sizes)]

    def _bytes(self, start: int, num_bytes: int) -> bytes:
        return os.pread(self._descriptor, num_bytes, self._start + start)

    def _mapped(self, num_bytes: int) -> Tensor:
        """Returns the first bytes of this part of the file, for which there is room: a write cannot fail."""
        if num_bytes > self._most_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        if self._memory is None or self._num_reserved < num_bytes:
            os.posix_fallocate(self._descriptor, self._start, num_bytes)
            self._num_reserved = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(self._descriptor, self._num_reserved, offset=self._start)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._memory


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _places(num_described: int, sizes: Sequence[int]) -> tuple[int, list[int], int]:
    """Returns where the sizes of values lie, where each value does, and where the last one ends."""
    begins = at = _aligned(_HEADER.size + num_described)
    at += 8 * len(sizes)
    places = []
    for size in sizes:
        at = _aligned(at)
        places.append(at)
        at += size
    return begins, places, max(at, 1)


def _aligned(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED
