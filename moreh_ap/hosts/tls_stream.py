"""A TLS connection whose directions are used by two threads at once.

Decides how that is safe: OpenSSL allows one thread at a time in a connection, and `ssl.SSLSocket` does not see to it
(up to Python 3.13.5 both are in it at once, later one waits for the other for ever). So encryption happens in memory,
under a lock that no thread holds while it waits for the network. Must not know what the bytes mean.

Source: https://docs.python.org/3/library/ssl.html#memory-bio-support
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from typing import Any

_PIECE_BYTES = 1 << 16


class TlsStream(io.RawIOBase):
    """Bytes in both directions. One thread reads while any others write.

    Args:
        plain: A connected socket; with a time-out, that is how long each wait may take.
        context: What certificates are shown and asked for.
        server_side: Whether the other end has connected to this one.
        server_hostname: The name or address in the other end's certificate, where the context has it checked.

    Raises:
        OSError: The connection cannot be made secure; an `ssl.SSLError` is one.
    """

    def __init__(
        self,
        plain: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool = False,
        server_hostname: str | None = None,
    ) -> None:
        self.plain = plain
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._arriving, self._leaving, server_side=server_side, server_hostname=server_hostname
        )
        self._rest = b""  # encrypted, and not taken by the network
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._send()
                self._receive()
        self._send()

    def certificate(self) -> bytes:
        """Returns the other end's certificate in DER; empty if it has shown none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Reads what has arrived, or waits for something; 0 at the end.

        Raises:
            OSError: The connection broke, or what has arrived was altered.
        """
        view = memoryview(buffer).cast("B")
        while True:
            try:
                with self._lock:
                    return self._tls.read(len(view), view)  # type: ignore[arg-type, return-value]
            except ssl.SSLWantReadError:
                # What the protocol itself has to say, rarely: with what is sent next, if another thread is sending now.
                self._send_now()
            except ssl.SSLZeroReturnError:
                return 0
            self._receive()

    def write(self, data: Any) -> int:
        """Sends all of `data`.

        Raises:
            OSError: The connection broke.
        """
        size = memoryview(data).nbytes
        if size:
            with self._lock:
                self._tls.write(data)
            self._send()
        return size

    def write_at_once(self, data: bytes) -> bool:
        """Encrypts all of `data` and sends what the network takes now; returns whether that was everything.

        Raises:
            OSError: The connection broke.
        """
        with self._lock:
            self._tls.write(data)
        return self._send_now()

    def write_rest(self) -> None:
        """Sends what is left of that.

        Raises:
            OSError: The connection broke.
        """
        self._send()

    def shut(self) -> None:
        """Ends both directions, which wakes the thread that reads."""
        self.plain.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.plain.close()
        super().close()

    def _send(self) -> None:
        with self._sending:  # what is encrypted first is sent first
            with self._lock:
                data, self._rest = self._rest + self._leaving.read(), b""
            if data:
                self.plain.sendall(data)

    def _send_now(self) -> bool:
        if not self._sending.acquire(blocking=False):
            return False
        try:
            with self._lock:
                self._rest += self._leaving.read()
            if self._rest:
                with contextlib.suppress(BlockingIOError):
                    self._rest = self._rest[self.plain.send(self._rest, socket.MSG_DONTWAIT) :]
            return not self._rest
        finally:
            self._sending.release()

    def _receive(self) -> None:
        data = self.plain.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._arriving.write(data)
            else:
                self._arriving.write_eof()
