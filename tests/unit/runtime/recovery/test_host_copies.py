"""Copies in memory of several hosts: as large as the fullest of them allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moreh_ap.runtime.host.host_connection import HostLostError
from moreh_ap.runtime.recovery.host_copies import HostCopies

WITH, WITHOUT = SimpleNamespace(copies=[(1, 2, "a")]), SimpleNamespace(copies=[])


class Connection:
    def __init__(self, free_bytes: int, machine: str, is_lost: bool = False) -> None:
        self.free_bytes, self.report, self._is_lost = free_bytes - 10, SimpleNamespace(machine=machine), is_lost
        self.copied_bytes = 10
        self.sent: list[str] = []

    def send(self, kind: str) -> None:
        if self._is_lost:
            raise HostLostError("gone")
        self.sent.append(kind)


@pytest.mark.parametrize(
    "hosts, serving, most",
    [
        ([(1000, "m"), (500, "n")], [WITH, WITH], 25),  # two slots of two workers, and of two of the other host
        ([(1000, "m"), (1000, "m")], [WITH, WITH], 25),  # containers of one machine
        ([(1000, "m")], [WITH], 100),
        ([(1000, "m"), (500, "n")], [WITH, WITHOUT], 0),
    ],
)
def test_the_fullest_host_decides(hosts, serving, most):
    connections = [Connection(*host) for host in hosts]
    assert HostCopies(connections, serving, per_host=2).most_bytes() == most


def test_the_copies_of_all_may_be_uneven_where_they_fit_together():
    copies = HostCopies([Connection(1000, "m"), Connection(500, "n")], [WITH, WITH], per_host=2)
    assert copies.fits(100) and not copies.fits(101)
    files, why = copies.move_to_disk(3 << 20)
    assert files == () and why.startswith("two need 6.0 MiB, and may take 40% of the 0.0 MiB of memory")


def test_every_host_gives_its_memory_back():
    connections = [Connection(1000, "m", is_lost=True), Connection(1000, "n")]
    HostCopies(connections, [WITH, WITH], per_host=2).close()
    assert connections[1].sent == ["forget"]
