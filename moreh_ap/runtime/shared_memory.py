"""Large values on their way to the workers of one machine: written once, read by all.

Decides where in a file in memory a value lies, and when its place can be used again. Must not know commands. The engine
would copy a value several times for each worker.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import pickle
import tempfile
import threading
from collections.abc import Iterator, Sequence

from moreh_ap.protocol.encoding import Place

_LIMIT_BYTES = 1 << 30
"""What does not fit below it travels with the engine."""


class SharedMemory:
    """The controller's side: a file in memory whose descriptor the workers inherit.

    Args:
        is_shared: Whether all workers are on this machine; values travel with the engine where they are not.

    Attributes:
        descriptor: The file descriptor.
    """

    def __init__(self, is_shared: bool = True) -> None:
        self._is_shared = is_shared
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("moreh")
        else:  # not Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._lock = threading.Lock()
        self._free: list[Place] = []  # in order, no two of them side by side
        self._end = 0

    def store(self, buffers: Sequence[pickle.PickleBuffer]) -> tuple[bytes | Place, ...]:
        """Returns where the tensors of a command are now; other buffers, and what does not fit, as bytes."""
        return tuple([self._store(buffer.raw()) for buffer in buffers])

    def release(self, buffers: Sequence[bytes | memoryview | Place]) -> None:
        """Lets the places of a command that all workers have executed be used again."""
        with self._lock:
            for place in buffers:
                if isinstance(place, Place):
                    self._put_back(place)

    def close(self) -> None:
        """Gives the descriptor back; what is stored from now on stays in the command itself."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1

    def _store(self, view: memoryview) -> Place | bytes:
        """Returns where in the file a value is now, or the value. A tensor's bytes are `bytes` (`TensorData`), of which
        workers keep a copy; they may keep other objects that pickle leaves out, such as an array, as they arrive."""
        if not isinstance(view.obj, bytes):
            return view.tobytes()
        with self._lock:
            place = self._take(view.nbytes)
            if place is None:
                return view.obj
            written = 0
            try:
                while written < view.nbytes:
                    written += os.pwrite(self.descriptor, view[written:], place.start + written)
            except OSError:  # no memory for the file, or it is closed: the engine takes the value
                self._put_back(place)
                return view.obj
            return place

    def _take(self, num_bytes: int) -> Place | None:
        for index, (start, length) in enumerate(self._free):
            if length >= num_bytes:
                rest = [Place(start + num_bytes, length - num_bytes)] if length > num_bytes else []
                self._free[index : index + 1] = rest
                return Place(start, num_bytes)
        if not self._is_shared or self._end + num_bytes > _LIMIT_BYTES:
            return None
        self._end += num_bytes
        return Place(self._end - num_bytes, num_bytes)

    def _put_back(self, place: Place) -> None:
        index = bisect.bisect(self._free, place)
        start, end, first, last = place.start, place.start + place.num_bytes, index, index
        if index > 0 and sum(self._free[index - 1]) == start:
            start, first = self._free[index - 1].start, index - 1
        if index < len(self._free) and self._free[index].start == end:
            end, last = sum(self._free[index]), index + 1
        self._free[first:last] = [Place(start, end - start)]


class SharedMemoryReader:
    """A worker's side.

    Args:
        descriptor: The file descriptor that the worker has inherited.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None

    @contextlib.contextmanager
    def values(self, buffers: Sequence[bytes | memoryview | Place]) -> Iterator[tuple[bytes | memoryview, ...]]:
        """Has the values of the buffers while the block lasts; whoever reads one later gets a `ValueError`."""
        found = [self._view(*one) if isinstance(one, tuple) else one for one in buffers]
        try:
            yield tuple(found)
        finally:
            for one in found:
                if isinstance(one, memoryview):
                    one.release()

    def _view(self, start: int, num_bytes: int) -> memoryview:
        if self._map is None or len(self._map) < start + num_bytes:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size, prot=mmap.PROT_READ)
        return memoryview(self._map)[start : start + num_bytes]
