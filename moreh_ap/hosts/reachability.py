"""Whether two hosts reach each other.

Decides how that is tried: a connection is made and closed again. Must not know who tries whom.
"""

from __future__ import annotations

import contextlib
import socket
import threading

CONNECT_S = 3.0


class Probe:
    """A socket to which others may connect, of which they learn nothing. Closed by `close`.

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
        with contextlib.suppress(OSError):  # closed
            while True:
                self._socket.accept()[0].close()

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


def family(address: str) -> socket.AddressFamily:
    """Returns the family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def free_port(address: str) -> int:
    """Returns a port that nobody listens at."""
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
