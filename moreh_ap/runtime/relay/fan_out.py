"""Which host hands commands on to which: a tree, so that the controller talks to a few hosts however many there are.

Decides the tree, and how one relay connects to the next. Must not know commands.

[Note: fan-out]
The controller, and each host that has others below it, talks to at most `FAN_OUT` hosts. A host answers for itself and
all hosts below it, by one message. Hosts are split into consecutive ranges, whose first host hands on to the rest of
its range, split in the same way. So answers are in rank order when they are put one behind the other.
`scripts/bench_hosts.py` measures what that costs (docs/several-machines.md).
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moreh_ap.hosts.reachability import CONNECT_S
from moreh_ap.hosts.tls_stream import TlsStream

FAN_OUT = 4


@dataclass(frozen=True)
class Branch:
    """A host, and the hosts to which it hands on.

    Attributes:
        address: Where its relay listens.
        port: The same.
        first: Its index among all hosts.
        num_hosts: It, and all hosts below it.
        below: The branches to which it hands on.
    """

    address: str
    port: int
    first: int
    num_hosts: int
    below: tuple[Branch, ...] = ()

    def has(self, host: int) -> bool:
        """Returns whether a host is this one or below it."""
        return self.first <= host < self.first + self.num_hosts


def branches_of(places: Sequence[tuple[str, int]], fan_out: int = FAN_OUT, first: int = 0) -> tuple[Branch, ...]:
    """Returns the branches to which whoever talks to these hosts hands on. See [Note: fan-out].

    Args:
        places: Address and port of each host's relay.
        fan_out: Hosts to which one hands on at most.
        first: The index of the first of these hosts among all.

    Example:
        >>> [branch.num_hosts for branch in branches_of([("10.0.0.1", 1)] * 9, fan_out=2)]
        [5, 4]
    """
    count, found, begin = min(fan_out, len(places)), [], 0
    for index in range(count):
        size = len(places) // count + (index < len(places) % count)
        (address, port), rest = places[begin], places[begin + 1 : begin + size]
        below = branches_of(rest, fan_out, first + begin + 1)
        found.append(Branch(address, port, first + begin, size, below))
        begin += size
    return tuple(found)


def packed(branch: Branch) -> bytes:
    """Returns what is sent to the host of a branch about it."""
    return json.dumps(_plain(branch), separators=(",", ":")).encode()


def unpacked(data: bytes) -> Branch:
    """Returns the branch that `packed` was given."""
    return _branch(json.loads(data))


def connect(branch: Branch, context: ssl.SSLContext) -> TlsStream:
    """Returns a connection to the relay of a branch.

    Raises:
        OSError: It cannot be reached, or shows no certificate of the run.
    """
    plain = socket.create_connection((branch.address, branch.port), timeout=CONNECT_S)
    try:
        stream = TlsStream(plain, context, server_hostname=branch.address)
    except OSError:
        plain.close()
        raise
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.settimeout(None)
    return stream


def _plain(branch: Branch) -> list[Any]:
    below = [_plain(one) for one in branch.below]
    return [branch.address, branch.port, branch.first, branch.num_hosts, below]


def _branch(plain: list[Any]) -> Branch:
    address, port, first, num_hosts, below = plain
    return Branch(address, port, first, num_hosts, tuple(_branch(one) for one in below))
