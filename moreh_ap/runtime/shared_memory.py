"""Large values on their way to the workers of a machine: written once, read by all.

Decides where in a file in memory a value lies, and when its place can be used again. Must not know commands. The engine
would copy a value several times for each worker.

[Note: several hosts]
Every host has such a file, of which this process decides the places; a value is sent to the agent of each host, which
writes it there, over the connection that carries commands and before the command that needs it (`relay`). So it is
there when a worker reads the command. Where a host has no memory left, its workers get the value's number.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from moreh_ap.protocol.encoding import OUT_OF_BAND_MIN_BYTES, Packed, Place, SentPlace

_LIMIT_BYTES = 1 << 30
"""Bytes of the file. Values that do not fit into it are sent by the engine."""

Carry = Callable[["int | None", int, int, "bytes | memoryview"], object]
"""Sends a host, by its index, or all of them a value: its number, where it belongs, and the value itself, which may be
another one once the call is over."""


Fetch = Callable[[SentPlace], bytes]
"""Returns a value that was sent to all hosts, from the memory of one."""


@runtime_checkable
class Lent(Protocol):
    """A value in memory of the script, which is another one once the command has been sent."""

    def write_to(self, memory: mmap.mmap, start: int) -> None:
        """Copies the value into a mapped file, from `start`."""


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
        self._end = self._end_written = 0  # up to the second, all of the file has been written before
        self._map: mmap.mmap | None = None
        self._carry: Carry | None = None
        self._fetch: Fetch | None = None
        self._per_host = self._last_number = 0
        self._first_number = 0  # of the values that `_carry` has sent

    def carry_by(self, carry: Carry, per_host: int, fetch: Fetch) -> None:
        """Has values from now on sent once to each host. See [Note: several hosts]."""
        with self._lock:
            self._carry, self._per_host, self._is_shared, self._fetch = carry, per_host, True, fetch
            self._first_number = self._last_number + 1

    def is_gone(self, buffers: Sequence[bytes | memoryview | Place | SentPlace]) -> bool:
        """Returns whether a value was sent before `carry_by` was called last, so that it may not have arrived."""
        return any(isinstance(one, SentPlace) and one.number < self._first_number for one in buffers)

    def store(
        self, buffers: Sequence[pickle.PickleBuffer], rank: int | None = None
    ) -> tuple[bytes | Place | SentPlace, ...]:
        """Returns where the tensors of a command are now; other buffers, and what does not fit, as bytes.

        Args:
            buffers: What the pickle of the command leaves out.
            rank: The only worker that gets the command; None: all do.
        """
        return tuple([self._store(buffer.raw(), rank) for buffer in buffers])

    def taken_out(self, payload: Packed | list[Packed]) -> Packed | list[Packed]:
        """Returns a command for all workers of this machine with its values in it: they outlive this memory.

        Others are returned as they are: one for each worker, and those for several hosts.
        """
        if not isinstance(payload, Packed) or self._carry is not None:
            return payload
        with contextlib.suppress(OSError):  # this memory is closed
            return payload._replace(buffers=tuple(self.read(payload.buffers)))
        return payload

    def read(self, buffers: Sequence[bytes | memoryview | Place | SentPlace]) -> list[bytes | memoryview]:
        """Returns the values of a command that was stored for all workers and not released.

        Raises:
            OSError: A host had no memory for one, or is lost.
        """
        found: list[bytes | memoryview] = []
        for one in buffers:
            if isinstance(one, SentPlace):
                if self._fetch is None or self.is_gone((one,)):
                    raise OSError("a value that the script has sent is lost with the workers of before")
                found.append(self._fetch(one))
            else:
                found.append(os.pread(self.descriptor, one.num_bytes, one.start) if isinstance(one, Place) else one)
        return found

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
            self.descriptor, self._is_shared, self._free, self._map = -1, False, [], None

    def _store(self, view: memoryview, rank: int | None) -> Place | SentPlace | bytes:
        """Returns where in the file a value is now, or the value.

        A tensor's bytes are `bytes` or lent (`TensorData`), and workers keep a copy of them. Other objects that pickle
        leaves out, such as an array, they may keep as they arrive.
        """
        value, lent = view.obj, view.obj if isinstance(view.obj, Lent) else None
        if lent is None and not isinstance(value, bytes):
            return view.tobytes()
        with self._lock:
            place = None if self._carry and view.nbytes < OUT_OF_BAND_MIN_BYTES else self._take(view.nbytes)
            if place is None:
                return value if isinstance(value, bytes) else view.tobytes()
            if self._carry is not None:
                self._last_number += 1
                host = None if rank is None else rank // self._per_host
                self._carry(host, self._last_number, place.start, view)
                return SentPlace(*place, self._last_number)
            if lent is not None and sum(place) <= self._end_written:
                lent.write_to(self._mapped(), place.start)
                return place
            written = 0
            try:
                while written < view.nbytes:
                    written += os.pwrite(self.descriptor, view[written:], place.start + written)
            except OSError:  # no memory for the file, or it is closed: the engine takes the value
                self._put_back(place)
                return value if isinstance(value, bytes) else view.tobytes()
            if place.start <= self._end_written:
                self._end_written = max(self._end_written, sum(place))
            return place

    def _mapped(self) -> mmap.mmap:
        """Returns the part of the file that has memory: a write there cannot fail, nor fault twice for a page."""
        if self._map is None or len(self._map) < self._end_written:
            self._map = mmap.mmap(self.descriptor, self._end_written)
        return self._map

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
    os.set_inheritable(descriptor, True)
    return descriptor


class SharedMemoryReader:
    """A worker's side.

    Args:
        descriptor: The file descriptor that the worker has inherited.

    Attributes:
        missing: Numbers of values for which this host had no memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.missing: set[int] = set()
        self._map: mmap.mmap | None = None

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

    def _view(self, start: int, num_bytes: int, number: int = 0) -> memoryview:
        if number in self.missing:  # 0, which no value has, for places on this machine
            raise MemoryError("this host has no memory left for what the script has sent its workers")
        if self._map is None or len(self._map) < start + num_bytes:
            self._map = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size, prot=mmap.PROT_READ)
        return memoryview(self._map)[start : start + num_bytes]
