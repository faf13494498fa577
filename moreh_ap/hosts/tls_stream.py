"""A TLS connection whose directions are used by two threads at once.

Decides how that is safe: OpenSSL allows one thread at a time in a connection, and `ssl.SSLSocket` does not see to it
(up to Python 3.13.5 both are in it at once, later one waits for the other for ever). So encryption happens in memory,
under a lock that no thread holds while it waits for the network. Must not know what the bytes mean.

Source: https://docs.python.org/3/library/ssl.html#memory-bio-support
"""

from __future__ import annotations

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

    Raises:
        OSError: The connection cannot be made secure; an `ssl.SSLError` is one.
    """

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, *, server_side: bool = False) -> None:
        self.plain = plain
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arriving, self._leaving, server_side=server_side)
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
                self._send(wait=False)
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

    def shut(self) -> None:
        """Ends both directions, which wakes the thread that reads."""
        self.plain.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.plain.close()
        super().close()

    def _send(self, *, wait: bool = True) -> None:
        if not self._sending.acquire(blocking=wait):
            return
        try:  # what is encrypted first is sent first
            with self._lock:
                data = self._leaving.read()
            if data:
                self.plain.sendall(data)
        finally:
            self._sending.release()

    def _receive(self) -> None:
        data = self.plain.recv(_PIECE_BYTES)
        with self._lock:
            if data:
                self._arriving.write(data)
            else:
                self._arriving.write_eof()
