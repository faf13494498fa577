"""Hosts that join while the workers run: those that were lost, and those that the file of hosts names since.

Decides when a host is tried, which can join, and over which link. Must not know when workers move there.

[Note: joining]
The controller connects to agents, so a host joins when the controller tries it: by ssh or in a Slurm job whatever is
listed, where `moreh-ap host` listens once it does. None is waited for: a thread tries one host after the other, and a
host that joins is compared with this machine, and reaches the hosts in use and they it, as at the start of a run. Its
agent then waits until there is a copy of what workers hold.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from moreh_ap.errors import OptionError
from moreh_ap.hosts import joining_checks
from moreh_ap.hosts.host_list import BY_KUBERNETES, parse_hosts, public_name
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.host_joining import Hosts, slowest_link

if TYPE_CHECKING:
    from moreh_ap.runtime.host.host_pool import HostPool

LOOK_S = 5.0
"""How often hosts that are not used are tried."""


class JoiningHosts:
    """Tries hosts until it is closed. See [Note: joining].

    Args:
        pool: The hosts of the run.
        used: Returns those that are used.
    """

    def __init__(self, pool: HostPool, used: Callable[[], Sequence[HostConnection]]) -> None:
        self._pool, self._used = pool, used
        self._waiting: list[HostConnection] = []
        self._said: set[str] = set()
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._look, name="moreh-joining", daemon=True).start()

    def waiting(self) -> list[HostConnection]:
        """Returns the hosts that can be used."""
        with self._lock:
            for one in [one for one in self._waiting if one.lost() is not None]:
                self._waiting.remove(one)
                one.end_soon()
            return list(self._waiting)

    def take(self, hosts: Sequence[HostConnection]) -> None:
        """Notes that hosts are used from now on."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one not in hosts]

    def close(self) -> None:
        """Tries no more hosts, and ends the agents that wait."""
        self._closed.set()
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.end()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            for host in self._not_used():
                self._try(host)

    def _not_used(self) -> list[str]:
        """Returns the hosts to try: a pod of Kubernetes that fails ends its job."""
        there = {*self._pool.refused, *(one.host for one in (*self._used(), *self.waiting()))}
        named = dict.fromkeys([*self._pool.given, *self._of_file()])
        return [host for host in named if host not in there and not host.startswith(BY_KUBERNETES)]

    def _of_file(self) -> Sequence[str]:
        file = self._pool.file
        try:
            return parse_hosts(file) if file else ()
        except (OptionError, OSError, ValueError) as error:  # it may be half written
            self._say_once(f"{file} cannot be read as a list of hosts: {error}")
            return ()

    def _try(self, host: str) -> None:
        used = list(self._used())
        found = self._pool.connect(host, used)
        error, over = joining_checks.error(found.rows), ""
        if error is None:
            over = self._measure(found, used)
            with self._lock:
                if not self._closed.is_set():
                    self._waiting += found.connections
                    found.connections = []
        elif host not in self._pool.given or any(row.what != "answer" for row in found.rows):
            self._say_once(error.fact)  # of one that was lost, the log knows that it does not answer
        if found.connections:
            found.end()
        elif error is None:
            self._pool.say(f"{public_name(host)} can join{over}, and does so after the next copy of what workers hold")

    def _measure(self, found: Hosts, used: Sequence[HostConnection]) -> str:
        """Notes the link of a host to those that are used, and returns how the log says it."""
        try:
            link = slowest_link(found, used)
        except (OSError, HostLostError) as error:
            return f" (its link was not measured: {error})"
        found.connections[0].link = link
        return f" over a link of {link.bytes_per_s / 1e6:,.0f} MB/s"

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._pool.say(line)
