"""An agent that a person starts by hand on a host: it waits for controllers, one after the other.

Decides who may use the host: who has the token that was printed, over a connection whose certificate was printed too.
Everyone else is turned away before anything is started. Must not know what a controller wants.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import IO, BinaryIO, cast

from moreh_ap.hosts.certificates import make_agent_secret
from moreh_ap.hosts.channel import BUSY, Channel
from moreh_ap.hosts.credentials import AgentSecret
from moreh_ap.hosts.reachability import connections, family
from moreh_ap.hosts.tls_stream import TlsStream
from moreh_ap.hosts.ways import local_command

_INTRODUCTION_S = 10.0  # how long a stranger may take to say the token
BUSY_S = 5.0
"""How long a script waits for the end of the one before; a controller waits 10 s for the first word."""
_PIECE_BYTES = 1 << 16
_LONGEST_TOKEN_BYTES = 200


class HostListener:
    """Listens for controllers.

    Args:
        address: Address of this host at which the controller and other hosts reach it.
        port: Port; 0: any that is free.
        secret: By which a script and this agent recognise each other; None: a new one.

    Attributes:
        port: The port.
        line: What a person gives the script.

    Raises:
        OSError: No interface has the address, or the port is taken.
    """

    def __init__(self, address: str, port: int = 0, secret: AgentSecret | None = None) -> None:
        own = secret or make_agent_secret()
        self._token = own.token.strip()
        self._context = _server_context(own.certificate, own.key)
        self._socket = socket.create_server((address, port), family=family(address))
        self.port = int(self._socket.getsockname()[1])
        self.line = own.line(address, self.port)
        self._busy = threading.Lock()

    def serve(self) -> None:
        """Lets controllers in, one at a time, until this process ends."""
        for plain in connections(self._socket):
            threading.Thread(target=self._introduce, args=(plain,), daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        self._socket.close()

    def _introduce(self, plain: socket.socket) -> None:
        """Turns a connection away that does not begin with the token, and relays one that does to an agent."""
        with contextlib.suppress(OSError):  # strangers get no answer, and no line in a log that they could fill
            plain.settimeout(_INTRODUCTION_S)
            stream = TlsStream(plain, self._context, server_side=True)
            said = b""
            while not said.endswith(b"\n") and len(said) < _LONGEST_TOKEN_BYTES:
                more = stream.read(1)  # nothing of what follows the token
                if not more:
                    break
                said += more
            if hmac.compare_digest(said.strip(), self._token.encode()):
                plain.settimeout(None)
                if self._busy.acquire(timeout=BUSY_S):
                    try:
                        _relay(stream)
                    finally:
                        self._busy.release()
                else:
                    Channel(cast("BinaryIO", stream), cast("BinaryIO", stream)).send(BUSY)
        plain.close()


def _server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with _in_memory(certificate) as certificate_file, _in_memory(key) as key_file:
        context.load_cert_chain(certificate_file, key_file)
    return context


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[str]:
    """Has a path of a file that only this process has open."""
    descriptor = os.memfd_create("moreh")
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _relay(stream: TlsStream) -> None:
    """Starts an agent and passes bytes on in both directions, until either side ends."""
    with tempfile.TemporaryFile() as errors:
        agent = subprocess.Popen(
            local_command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert agent.stdin is not None and agent.stdout is not None, "asked for"
        back = threading.Thread(target=_pass_on, args=(agent.stdout, stream), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while piece := stream.read(_PIECE_BYTES):
                agent.stdin.write(piece)
                agent.stdin.flush()
        with contextlib.suppress(OSError):
            agent.stdin.close()  # its input ends: it ends
        agent.wait()
        back.join()


def _pass_on(source: IO[bytes], stream: TlsStream) -> None:
    with contextlib.suppress(OSError):
        while piece := os.read(source.fileno(), _PIECE_BYTES):
            stream.write(piece)
    with contextlib.suppress(OSError):
        stream.shut()  # wakes the other direction
