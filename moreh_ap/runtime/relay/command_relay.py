"""The agent's part: hands each command on to the workers of this host and to the hosts below it, and joins the answers.

Decides who may connect, and when the answer of the host is complete. Must not know commands: their bytes are handed on.

[Note: two listeners]
Workers connect to a socket in a folder that only this user can enter. The controller, or the host above this one,
connects to a port, by TLS 1.3 with certificates of the run on both sides. The first that shows one is let in, and the
port is closed then.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from moreh_ap.hosts.credentials import context_of
from moreh_ap.hosts.reachability import connections, family
from moreh_ap.hosts.tls_stream import TlsStream
from moreh_ap.runtime.relay import fan_out
from moreh_ap.runtime.relay.answers import JoinedAnswers
from moreh_ap.runtime.relay.fan_out import Branch
from moreh_ap.runtime.relay.frames import (
    ALL_HOSTS,
    ANSWER,
    BRANCH,
    ENDED,
    FAILURE,
    HELLO,
    MISSING,
    VALUE,
    Frame,
    Sender,
    SocketOutgoing,
    read,
)

SOCKET = "commands"
_HANDSHAKE_S = 10.0  # how long who connects may take to show a certificate


@dataclass(frozen=True)
class _Below:
    """A worker of this host, or a host below it with all hosts below that one."""

    sender: Sender
    branch: Branch | None = None


class CommandRelay:
    """The relay of one host.

    Args:
        folder: A folder that only this user can enter.
        num_workers: Workers of this host, and of each other one.
        address: Address of this host at which the controller reaches it.
        credentials: What `Credentials.as_files` returned.
        memory_fd: Descriptor of the host's memory for large values.

    Attributes:
        path: The socket to which workers connect.
        port: The port to which the controller connects.
    """

    def __init__(
        self, folder: Path, num_workers: int, address: str, credentials: Mapping[str, str], memory_fd: int
    ) -> None:
        self.path = str(folder / SOCKET)
        self._num_workers, self._memory_fd = num_workers, memory_fd
        self._to_here = context_of(credentials, is_server=True)
        self._from_here = context_of(credentials, is_server=False)
        self._workers: dict[int, Sender] = {}
        self._changed = threading.Condition()
        self._below: list[_Below] = []  # the workers in their order, then the hosts
        self._counts: list[int] = []  # for how many workers each answers
        self._own: Branch | None = None
        self._answers: dict[int, JoinedAnswers] = {}
        self._above: Sender | None = None
        self._above_stream: TlsStream | None = None
        self._follower: threading.Thread | None = None  # of that
        self._is_closed = False
        self._unwritten: set[int] = set()  # numbers of values for which there was no memory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(num_workers)
        self._port = socket.create_server((address, 0), family=family(address))
        self.port = int(self._port.getsockname()[1])
        for name, target in (("workers", self._let_workers_in), ("commands", self._let_in)):
            threading.Thread(target=target, name=f"moreh-{name}", daemon=True).start()

    def close(self) -> None:
        """Accepts no further connections and ends the one to the relay above: nothing is written to it after this."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            above, follower = self._above_stream, self._follower
        _end_listening(self._listener)
        _end_listening(self._port)
        if above is not None and follower is not None:
            with contextlib.suppress(OSError):  # the other side has ended it
                above.shut()
            follower.join()

    def oldest(self) -> tuple[int | None, list[int]]:
        """Returns the oldest command that workers of this host have not answered, and which; None: there is none."""
        with self._changed:
            for number, joined in self._answers.items():
                silent = [source for source in joined.missing() if source < self._num_workers]
                if silent:
                    return number, silent
        return None, []

    def read_value(self, number: int, start: int, num_bytes: int) -> bytes:
        """Returns bytes of a value that was kept here.

        Raises:
            OSError: There was no memory for the value.
        """
        if number in self._unwritten:
            raise OSError("the host had no memory for a value that the script has sent")
        return os.pread(self._memory_fd, num_bytes, start)

    # -- from below ------------------------------------------------------------------------------------------------

    def _let_workers_in(self) -> None:
        with self._listener, contextlib.suppress(OSError):  # it is closed
            for _ in range(self._num_workers):
                plain = self._listener.accept()[0]
                threading.Thread(target=self._follow_worker, args=(plain,), daemon=True).start()

    def _follow_worker(self, plain: socket.socket) -> None:
        stream = plain.makefile("rb")
        hello = read(stream)
        if hello is None or hello.kind != HELLO:
            return
        with self._changed:
            self._workers[hello.number] = Sender(SocketOutgoing(plain))
            self._changed.notify_all()
        while (frame := read(stream)) is not None:  # the end of its process is reported elsewhere
            self._take(hello.number, frame)

    def _follow_host(self, index: int, branch: Branch, stream: TlsStream) -> None:
        reader = _reader(stream)
        while (frame := read(reader)) is not None:
            self._take(index, frame)
        self._tell(ENDED, branch.first, 0, [b""])

    def _take(self, index: int, frame: Frame) -> None:
        if frame.kind == ENDED:
            self._tell(*frame)
            return
        if frame.kind == FAILURE:  # at once: others may wait for this worker in vain
            self._tell(*frame)
            if self._below[index].branch is not None:  # its answer follows
                return
        with self._changed:
            joined = self._answers[frame.number]
            if not joined.take(index, frame.parts):
                return
            del self._answers[frame.number]
        self._tell(ANSWER, frame.number, frame.epoch, joined.parts())

    def _tell(self, kind: int, number: int, epoch: int, parts: list[bytes]) -> None:
        assert self._above is not None, "commands come from it"
        self._above.send(kind, number, epoch, parts)

    # -- from above ------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        for plain in connections(self._port):
            threading.Thread(target=self._follow_above, args=(plain,), daemon=True).start()

    def _follow_above(self, plain: socket.socket) -> None:
        plain.settimeout(_HANDSHAKE_S)
        try:
            stream = TlsStream(plain, self._to_here, server_side=True)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.settimeout(None)
        except OSError:  # strangers get no answer
            plain.close()
            return
        with self._changed:
            if self._above is not None or self._is_closed:
                stream.close()
                return
            self._above, self._above_stream = Sender(stream), stream
            self._follower = threading.current_thread()
        _end_listening(self._port)
        reader = _reader(stream)
        while (frame := read(reader)) is not None and not self._is_closed:
            if frame.kind == BRANCH:
                self._connect(fan_out.unpacked(frame.parts[0]))
            elif frame.kind == VALUE:
                self._keep(frame)
            else:
                self._hand_on(frame)
        for one in self._below:
            one.sender.close()

    def _connect(self, own: Branch) -> None:
        """Waits for the workers, which connect before they join each other, and connects to the hosts below."""
        with self._changed:
            while len(self._workers) < self._num_workers and not self._is_closed:
                self._changed.wait()
            if self._is_closed:
                return
        self._own = own
        self._below = [_Below(self._workers[index]) for index in range(self._num_workers)]
        streams = []
        for branch in own.below:
            try:
                stream = fan_out.connect(branch, self._from_here)
            except OSError as error:
                self._tell(ENDED, branch.first, 0, [f"{own.address} does not reach it: {error}".encode()])
                return
            sender = Sender(stream)
            sender.send(BRANCH, 0, 0, [fan_out.packed(branch)])
            streams.append((len(self._below), branch, stream))
            self._below.append(_Below(sender, branch))
        self._counts = [1 if one.branch is None else one.branch.num_hosts * self._num_workers for one in self._below]
        for arguments in streams:
            threading.Thread(target=self._follow_host, args=arguments, daemon=True).start()

    def _hand_on(self, frame: Frame) -> None:
        with self._changed:
            self._answers[frame.number] = JoinedAnswers(self._counts)
        begin = 0
        for one, count in zip(self._below, self._counts):
            parts = frame.parts if len(frame.parts) == 1 else frame.parts[begin : begin + count]
            one.sender.send(frame.kind, frame.number, frame.epoch, parts)
            begin += count

    def _keep(self, frame: Frame) -> None:
        """Writes a value where the workers of this host read it, or tells them that it is not there; hands it on."""
        assert self._own is not None, "it comes first"
        only = frame.epoch
        for one in self._below:
            if one.branch is not None and (only == ALL_HOSTS or one.branch.has(only)):
                one.sender.send(*frame)
        if only not in (ALL_HOSTS, self._own.first):
            return
        start, value = int.from_bytes(frame.parts[0], "little"), memoryview(frame.parts[1])
        written = 0
        try:
            while written < len(value):
                written += os.pwrite(self._memory_fd, value[written:], start + written)
        except OSError:  # no memory for the file: a command that names the value raises
            self._unwritten.add(frame.number)
            for worker in self._workers.values():
                worker.send(MISSING, frame.number, 0, [])


def _reader(stream: TlsStream) -> BinaryIO:
    return cast("BinaryIO", io.BufferedReader(stream, 1 << 16))


def _end_listening(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
    listener.close()
