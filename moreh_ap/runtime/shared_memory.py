"""Large values on their way to the workers of a machine: written once, read by all.

Decides where in a file in memory a value lies, and when its place can be used again. Must not know commands. The engine
would copy a value several times for each worker.

[Note: several hosts]
Every host has such a file, of which this process decides the places; a value is sent to one worker of each host, which
writes it there. It travels beside the command that needs it, and the engine keeps the order of one thread's messages
only. So each value has a number, and a file begins with a table: for each piece of the file, as long as the shortest
value, the number of the value that was written last of those that begin in it. A worker waits for its value's number.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Place, SentPlace

_LIMIT_BYTES = 1 << 30
"""What does not fit below it travels with the engine."""

_PIECE_BYTES = OUT_OF_BAND_MIN_BYTES  # so no two values that are there at the same time begin in one piece
_TABLE_BYTES = 8 * (_LIMIT_BYTES // _PIECE_BYTES)
_NOT_WRITTEN = (1 << 64) - 1
_AGAIN_S = 0.0002

Carry = Callable[[int, int, int, bytes], object]
"""Sends a host, by its index, a value: its number, where it belongs, and the value itself."""


class SharedMemory:
    """The controller's side: a file in memory whose descriptor the workers inherit.

    Args:
        is_shared: Whether all workers are on this machine; values travel with the engine where they are not, until
            `carry_by` says how hosts get them.

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
        self._carry: Carry | None = None
        self._num_hosts = self._per_host = self._last_number = 0

    def carry_by(self, carry: Carry, num_hosts: int, per_host: int) -> None:
        """Has values from now on sent once to each host. See [Note: several hosts]."""
        with self._lock:
            self._carry, self._num_hosts, self._per_host = carry, num_hosts, per_host
            self._end, self._is_shared = _TABLE_BYTES, True

    def store(
        self, buffers: Sequence[pickle.PickleBuffer], rank: int | None = None
    ) -> tuple[bytes | Place | SentPlace, ...]:
        """Returns where the tensors of a command are now; other buffers, and what does not fit, as bytes.

        Args:
            buffers: What the pickle of the command leaves out.
            rank: The only worker that gets the command; None: all do.
        """
        return tuple([self._store(buffer.raw(), rank) for buffer in buffers])

    def release(self, buffers: Sequence[bytes | memoryview | Place | SentPlace]) -> None:
        """Lets the places of a command that all workers have executed be used again."""
        with self._lock:
            for place in buffers:
                if isinstance(place, Place):
                    self._put_back(place)
                elif isinstance(place, SentPlace):
                    self._put_back(Place(place.start, place.num_bytes))

    def close(self) -> None:
        """Gives the descriptor back; what is stored from now on stays in the command itself."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor, self._is_shared, self._free = -1, False, []

    def _store(self, view: memoryview, rank: int | None) -> Place | SentPlace | bytes:
        """Returns where in the file a value is now, or the value. A tensor's bytes are `bytes` (`TensorData`), of which
        workers keep a copy; they may keep other objects that pickle leaves out, such as an array, as they arrive."""
        if not isinstance(view.obj, bytes):
            return view.tobytes()
        with self._lock:
            place = None if self._carry and view.nbytes < _PIECE_BYTES else self._take(view.nbytes)
            if place is None:
                return view.obj
            if self._carry is not None:
                self._last_number += 1
                for host in range(self._num_hosts) if rank is None else (rank // self._per_host,):
                    self._carry(host, self._last_number, place.start, view.obj)
                return SentPlace(*place, self._last_number)
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


def make_host_memory() -> int:
    """Returns the descriptor of a file in memory for the workers of a host, which they inherit."""
    descriptor = os.memfd_create("moreh", 0)
    os.ftruncate(descriptor, _TABLE_BYTES)
    os.set_inheritable(descriptor, True)
    return descriptor


class SharedMemoryReader:
    """A worker's side. `keep` is called by another thread than the rest.

    Args:
        descriptor: The file descriptor that the worker has inherited.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._numbers: memoryview | None = None

    @contextlib.contextmanager
    def values(
        self, buffers: Sequence[bytes | memoryview | Place | SentPlace]
    ) -> Iterator[tuple[bytes | memoryview, ...]]:
        """Has the values of the buffers while the block lasts; reading one later is a `ValueError`.

        Raises:
            MemoryError: A value could not be written on this host.
        """
        found = [self._view(*one) if isinstance(one, tuple) else one for one in buffers]
        try:
            yield tuple(found)
        finally:
            for one in found:
                if isinstance(one, memoryview):
                    one.release()

    def keep(self, number: int, start: int, value: bytes) -> None:
        """Writes a value that this worker was sent for all workers of its host."""
        written = 0
        try:
            while written < len(value):
                written += os.pwrite(self._descriptor, memoryview(value)[written:], start + written)
        except OSError:  # no memory for the file: readers raise
            number = _NOT_WRITTEN
        self._table()[start // _PIECE_BYTES] = number

    def _table(self) -> memoryview:
        """Returns the numbers, a machine word each. See [Note: several hosts]."""
        if self._numbers is None:
            self._numbers = memoryview(mmap.mmap(self._descriptor, _TABLE_BYTES)).cast("Q")
        return self._numbers

    def _view(self, start: int, num_bytes: int, number: int = 0) -> memoryview:
        if number:
            table, piece = self._table(), start // _PIECE_BYTES
            while table[piece] not in (number, _NOT_WRITTEN):  # on its way: workers end with what brings it
                time.sleep(_AGAIN_S)
            if table[piece] == _NOT_WRITTEN:
                raise MemoryError("this host has no memory left for what the script has sent its workers")
        if self._map is None or len(self._map) < start + num_bytes:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size, prot=mmap.PROT_READ)
        return memoryview(self._map)[start : start + num_bytes]
