"""Whether two hosts reach each other, and how fast.

Decides how that is tried: a connection is made and closed again, or some bytes are sent for a moment. Must not know who
tries whom.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONNECT_S = 3.0
_AGAIN_S = 0.1
_ROUNDS = 5
_FIRST_BYTES, _MOST_BYTES = 1 << 18, 1 << 24
_WANTED_S = 0.2
"""How long bytes are sent to find out how many pass."""


@dataclass(frozen=True)
class Speed:
    """What one connection between two hosts does.

    Attributes:
        round_trip_s: A byte there and one back.
        bytes_per_s: What passes in one direction.
    """

    round_trip_s: float
    bytes_per_s: float


def slowest(speeds: Sequence[Speed]) -> Speed:
    """Returns what all of some connections do at least."""
    return Speed(max(one.round_trip_s for one in speeds), min(one.bytes_per_s for one in speeds))


class Probe:
    """A socket to which others may connect, of which they learn nothing but how fast it is. Closed by `close`.

    Args:
        address: Address of this host.

    Raises:
        OSError: No interface of this host has the address.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.create_server((address, 0), family=family(address))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, name="moreh-probe", daemon=True).start()

    def _accept(self) -> None:
        for connection in connections(self._socket):
            threading.Thread(target=_take, args=(connection,), name="moreh-probe", daemon=True).start()

    def close(self) -> None:
        """Stops listening."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()


def reaches(address: str, port: int) -> str:
    """Returns why no connection to a port could be made, empty where it could."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""


def loopback_address(host: str) -> str:
    """Returns the address for which a host's name stands on this machine if only the machine itself has it, else "".

    Args:
        host: As ssh is told it: perhaps with a user, perhaps no name that others than ssh know.
    """
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(host.rpartition("@")[2], None)}
    except OSError:
        return ""
    are_own = all(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found)
    return min(found) if are_own else ""


def _take(connection: socket.socket) -> None:
    """Reads as many bytes as the first eight say, and answers with one, until the other side ends."""
    with contextlib.suppress(OSError), connection:
        connection.settimeout(CONNECT_S)
        with connection.makefile("rb") as stream:
            for _ in range(_ROUNDS + 2):
                left = int.from_bytes(stream.read(8), "big")
                if not 0 < left <= _MOST_BYTES:
                    return
                while left:
                    piece = stream.read(min(left, 1 << 16))
                    if not piece:
                        return
                    left -= len(piece)
                connection.sendall(b".")


def measure(address: str, port: int) -> Speed:
    """Returns how fast the connection to a probe is. Takes up to half a second, or three on a very slow link.

    Raises:
        OSError: There is no probe, or it does not answer in time.
    """
    with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def taken_s(num_bytes: int) -> float:
            began_s = time.perf_counter()
            connection.sendall(num_bytes.to_bytes(8, "big") + bytes(num_bytes))
            if connection.recv(1) != b".":
                raise ConnectionError("the other host has stopped listening")
            return time.perf_counter() - began_s

        round_trip_s = statistics.median(taken_s(1) for _ in itertools.repeat(None, _ROUNDS))
        first_s = max(taken_s(_FIRST_BYTES) - round_trip_s, 1e-6)
        more = int(min(_MOST_BYTES, _FIRST_BYTES * _WANTED_S / first_s))
        if more <= _FIRST_BYTES:
            return Speed(round_trip_s, _FIRST_BYTES / first_s)
        return Speed(round_trip_s, more / max(taken_s(more) - round_trip_s, 1e-6))


def family(address: str) -> socket.AddressFamily:
    """Returns the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connections(listener: socket.socket) -> Iterator[socket.socket]:
    """Yields the connections that others make, until `listener` is closed."""
    while listener.fileno() >= 0:
        try:
            connection, _ = listener.accept()
        except OSError:  # closed, or a stranger that has gone again
            if listener.fileno() >= 0:
                time.sleep(_AGAIN_S)
            continue
        yield connection


def free_port(address: str) -> int:
    """Returns a port that is not in use."""
    with socket.create_server((address, 0), family=family(address)) as found:
        return int(found.getsockname()[1])


def own_address_towards(address: str) -> str:
    """Returns this host's address in connections to another one, without connecting.

    Raises:
        OSError: No route leads to it.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as unconnected:
        unconnected.connect((address, 9))
        return str(unconnected.getsockname()[0])
