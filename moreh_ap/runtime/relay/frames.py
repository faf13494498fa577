"""Frames: what controller, agents and workers of several hosts send each other with every command.

Decides how a frame is written, and that sending one never waits. Must not know commands: their bytes are handed on.

[Note: frames]
A frame is a kind, two numbers and parts, which are bytes. Whoever sends one goes on at once: what the connection does
not take now, a thread sends, which is started when it is needed for the first time. So a worker that executes a long
command keeps neither its agent from reading, nor the script from going on.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple, Protocol

COMMAND, ANSWER, FAILURE, VALUE, MISSING, HELLO, BRANCH, ENDED = range(8)
"""Kinds: a command, its answer, an answer that is a failure, a value for the memory of the host, a value that could not
be written there, the first frame of a worker, the first to a host (`fan_out.py`), and the end of the connection to a
host below. Numbers are those of the command, the value, the worker or the host."""

ALL_HOSTS = 0xFFFFFFFF
"""Stands where a frame with a value has the number of the only host that gets it."""

_HEAD = struct.Struct("<BQII")  # kind, number, epoch, parts
_AT_ONCE_BYTES = 1 << 18  # larger frames are left to the thread: encrypting them takes a while
_MOST_PARTS = 1 << 16
_READ_BYTES = 1 << 20


class Frame(NamedTuple):
    """One frame; see [Note: frames]."""

    kind: int
    number: int
    epoch: int
    parts: list[bytes]


def written(kind: int, number: int, epoch: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """Returns a frame as it is sent."""
    sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
    return b"".join((_HEAD.pack(kind, number, epoch, len(parts)), sizes, *parts))


def read(stream: BinaryIO) -> Frame | None:
    """Returns the next frame, None where the other side has ended or is no side of this package."""
    try:
        head = stream.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        kind, number, epoch, count = _HEAD.unpack(head)
        if count > _MOST_PARTS:
            return None
        sizes = struct.unpack(f"<{count}Q", stream.read(8 * count))
        total = sum(sizes)
        data = stream.read(total)
    except (OSError, ValueError, struct.error):  # the connection broke, or this side has closed it
        return None
    if len(data) < total:
        return None
    if count == 1:
        return Frame(kind, number, epoch, [data])
    ends = list(itertools.accumulate(sizes, initial=0))
    return Frame(kind, number, epoch, [data[begin:end] for begin, end in itertools.pairwise(ends)])


class Arriving:
    """Frames that arrive on a socket of this machine, read without waiting: their sender may stop in the middle of one.

    Args:
        plain: The socket.
    """

    def __init__(self, plain: socket.socket) -> None:
        self._plain, self._data, self._needed = plain, bytearray(), _HEAD.size

    def take(self) -> list[Frame] | None:
        """Returns the frames that are complete now; None once the other side has ended, or is no side of this package.

        To be called when the socket is readable.
        """
        data = self._data
        try:
            part = self._plain.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:  # the connection broke
            return None
        if not part:
            return None
        data += part
        found = []
        while len(data) >= self._needed:
            kind, number, epoch, count = _HEAD.unpack_from(data)
            if count > _MOST_PARTS:
                return None
            begin = end = _HEAD.size + 8 * count
            if len(data) >= begin:
                sizes = struct.unpack_from(f"<{count}Q", data, _HEAD.size)
                end += sum(sizes)
            if len(data) < end:
                self._needed = end
                break
            parts = []
            for size in sizes:
                parts.append(bytes(data[begin : begin + size]))
                begin += size
            found.append(Frame(kind, number, epoch, parts))
            del data[:end]
            self._needed = _HEAD.size
        return found


class Outgoing(Protocol):
    """One direction of a connection."""

    def write_at_once(self, data: bytes) -> bool:
        """Takes all of `data` and sends what the network takes now; returns whether that was everything.

        Raises:
            OSError: The connection broke.
        """

    def write_rest(self) -> None:
        """Sends what is left, and waits for that.

        Raises:
            OSError: The connection broke.
        """


class SocketOutgoing:
    """The outgoing direction of a socket of this machine."""

    def __init__(self, plain: socket.socket) -> None:
        self._plain, self._rest = plain, b""

    def write_at_once(self, data: bytes) -> bool:
        self._rest += data
        with contextlib.suppress(BlockingIOError):
            self._rest = self._rest[self._plain.send(self._rest, socket.MSG_DONTWAIT) :]
        return not self._rest

    def write_rest(self) -> None:
        rest, self._rest = self._rest, b""
        self._plain.sendall(rest)


class Sender:
    """Sends frames in their order, never waiting; what is sent after the connection broke is lost. Any thread may send.

    Args:
        outgoing: Where they go.

    Attributes:
        num_sent: How many frames were given to it.
    """

    def __init__(self, outgoing: Outgoing) -> None:
        self.num_sent = 0
        self._outgoing = outgoing
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._is_behind = self._is_broken = False  # behind: the thread has something to send
        self._thread: threading.Thread | None = None

    def send(self, kind: int, number: int, epoch: int, parts: Sequence[bytes | memoryview]) -> None:
        """Sends a frame."""
        self.send_written(written(kind, number, epoch, parts))

    def send_written(self, data: bytes) -> None:
        """Sends a frame that `written` has returned."""
        with self._changed:
            self.num_sent += 1
            if self._is_broken:
                return
            if self._is_behind or len(data) > _AT_ONCE_BYTES:
                self._waiting.append(data)
            else:
                try:
                    if self._outgoing.write_at_once(data):
                        return
                except OSError:  # whoever reads the connection notices, too
                    self._is_broken = True
                    return
            self._is_behind = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._catch_up, name="moreh-frames", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Sends nothing any more, and ends the thread."""
        with self._changed:
            self._is_broken = True
            self._waiting.clear()
            self._changed.notify()

    def _catch_up(self) -> None:
        while True:
            with self._changed:
                while not self._is_behind and not self._is_broken:
                    self._changed.wait()
                if self._is_broken:
                    return
            try:
                self._outgoing.write_rest()
                with self._changed:
                    data = self._waiting.popleft() if self._waiting else None
                    if data is None:
                        self._is_behind = False
                        continue
                self._outgoing.write_at_once(data)
            except OSError:
                self.close()
                return
