"""How the agent of a host is reached: by ssh, by Slurm, in a Kubernetes job, as a process of this machine, or where
it was started by hand.

Decides command lines, addresses and environment of what carries the messages, and that a stranger cannot take a host's
place. Must not know messages.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import os
import shlex
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

from moreh_ap.hosts.clusters import kubernetes, slurm
from moreh_ap.hosts.credentials import fingerprint
from moreh_ap.hosts.host_list import BY_HAND, BY_KUBERNETES, BY_SLURM, LOCAL_NAMES, SSH_VARIABLE, by_hand
from moreh_ap.hosts.reachability import CONNECT_S
from moreh_ap.hosts.tls_stream import TlsStream

AGENT = "moreh_ap.runtime.host.remote_agent"


_SSH_OPTIONS = (
    "BatchMode=yes",  # no question on the script's terminal
    "ConnectTimeout=8",
    "ServerAliveInterval=5",  # a cut link ends ssh, and with it this side's stream, after 10 s
    "ServerAliveCountMax=2",
    "ClearAllForwardings=yes",
)
_END_S = 5.0

ENGINE_BANNER = "Monarch internal logs"
"""The beginning of what the engine prints in every process, which explains nothing."""


class Way(Protocol):
    """Two streams to an agent."""

    reader: BinaryIO
    writer: BinaryIO
    address: str
    """Address of the host, where the way itself knows it."""

    def last_words(self) -> str:
        """Returns what was printed beside the messages, such as errors of ssh."""

    def close(self) -> None:
        """Ends the streams, which ends the agent."""


class ProcessWay:
    """An agent behind a process of this machine: ssh, or the agent itself."""

    def __init__(self, command: list[str], environment: Mapping[str, str], address: str = "") -> None:
        self.address = address
        self._closing = threading.Lock()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C is for the script
        )
        self.reader = cast("BinaryIO", self._process.stdout)
        self.writer = cast("BinaryIO", self._process.stdin)

    def last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its last line may be on its way
        with self._closing:
            if self._errors.closed:  # the host was given up meanwhile
                return ""
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            return "\n".join([line for line in lines if not line.startswith(ENGINE_BANNER)][-5:])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.writer.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._closing:
            self._errors.close()


@dataclass
class TlsWay:
    """An agent that listens: started by hand, or by Kubernetes."""

    stream: TlsStream
    reader: BinaryIO
    writer: BinaryIO
    address: str

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.shut()
        self.stream.close()


def reach(host: str) -> Way:
    """Returns the streams to a host's agent, as far as they can be opened without waiting for it to say anything.

    Raises:
        OSError: Nobody listens there, or a program is missing.
        PermissionError: Another one than the agent listens there.
    """
    if host.startswith(BY_HAND):
        return _by_hand(host)
    if host.startswith(BY_SLURM):
        node = host.removeprefix(BY_SLURM)
        return ProcessWay(slurm.command(node, local_command()), _environment(), slurm.address_of(node))
    if host.startswith(BY_KUBERNETES):
        pod = host.removeprefix(BY_KUBERNETES)
        if pod == kubernetes.own_pod(os.environ):
            return ProcessWay(local_command(), _environment(), os.environ[kubernetes.ADDRESS_VARIABLE])
        return _by_hand(kubernetes.line_of(pod, os.environ))
    if host in LOCAL_NAMES:
        return ProcessWay(local_command(), _environment())
    return ProcessWay(ssh_command(host, os.environ.get(SSH_VARIABLE, "ssh")), os.environ)


def ssh_command(host: str, ssh: str) -> list[str]:
    """Returns the command line that starts the agent of a host through ssh.

    Args:
        host: What ssh is told to connect to.
        ssh: The program, with options of the user.
    """
    options = [word for option in _SSH_OPTIONS for word in ("-o", option)]
    return [*shlex.split(ssh), "-T", *options, "--", host, remote_command()]


def remote_command() -> str:
    """Returns what runs on a host: the Python and the package of this process, at the same paths there."""
    words = [*(f"{name}={value}" for name, value in _paths().items()), sys.executable, "-m", AGENT]
    return f"exec env {shlex.join(words)}"


def local_command() -> list[str]:
    """Returns the command line of an agent on this machine."""
    return [sys.executable, "-m", AGENT]


def _environment() -> dict[str, str]:
    return {**os.environ, **_paths()}


def _paths() -> dict[str, str]:
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONSAFEPATH": "1"}


def _by_hand(host: str) -> TlsWay:
    """Connects to an agent that listens, shows it the token, and recognises it by its certificate."""
    address, port, expected, token = by_hand(host)
    plain = socket.create_connection((address, port), timeout=CONNECT_S)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it signs its own certificate: see below
    try:
        stream = TlsStream(plain, context)
    except OSError:
        plain.close()
        raise
    if not hmac.compare_digest(fingerprint(stream.certificate()), expected):  # before anything is sent
        stream.close()
        raise PermissionError("another program listens there: its certificate is not that of the agent")
    plain.settimeout(None)
    stream.write(token.encode() + b"\n")
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
    return TlsWay(stream, io.BufferedReader(stream), cast("BinaryIO", stream), plain_address(plain))


def plain_address(connection: socket.socket) -> str:
    """Returns the numeric address of the other end."""
    return str(connection.getpeername()[0])
