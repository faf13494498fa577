"""Copies in memory of several hosts, as large as the fullest of them allows, or on disk where that is too little."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moreh_ap.runtime.host.host_connection import HostLostError
from moreh_ap.runtime.recovery.copy_memory import CopyMemory
from moreh_ap.runtime.recovery.host_copies import HostCopies, told_to_agents

WITH, WITHOUT = SimpleNamespace(copies=[(1, 2, "a")]), SimpleNamespace(copies=[])


class Connection:
    def __init__(self, free_bytes: int, machine: str, is_lost: bool = False) -> None:
        self.usage, self.report, self._is_lost = {}, SimpleNamespace(machine=machine), is_lost
        self.name, self.room_for_copies = machine, free_bytes
        self.sent: list[str] = []
        self.asked: list[int] = []
        self.answers = [{"has_room": True, "why": "", "room_for_copies": 7}] * 3

    def ask(self, kind: str, timeout_s: float, num_bytes: int) -> SimpleNamespace:
        if self._is_lost:
            raise HostLostError("gone")
        assert kind == "room"
        self.asked.append(num_bytes)
        return SimpleNamespace(values=self.answers.pop(0))

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
    assert HostCopies(connections, serving, 2, None).most_bytes() == most


def test_the_copies_of_all_may_be_uneven_where_they_fit_together():
    copies = HostCopies([Connection(1000, "m"), Connection(500, "n")], [WITH, WITH], 2, None)
    assert copies.fits(100) and not copies.fits(101)
    copies = HostCopies([Connection(1000, "m"), Connection(1000, "m")], [WITH, WITH], 2, None)
    assert copies.fits(100) and not copies.fits(101), "containers of one machine"


def test_each_host_makes_room_by_its_own_memory_and_disk():
    hosts = [Connection(1000, name) for name in "mno"]
    known = CopyMemory(6)
    copies = HostCopies(hosts, [WITH] * 3, 2, known)
    hosts[1].answers = [{"has_room": True, "why": "two need 8 bytes, and are files in /tmp", "room_for_copies": 9}]
    assert copies.move_to_disk(6, 1) == (True, "on n, two need 8 bytes, and are files in /tmp")
    assert [one.asked for one in hosts] == [[4]] * 3, "copies of its workers, and of those of the host before it"
    assert [one.usage["room_for_copies"] for one in hosts] == [7, 9, 7]
    assert told_to_agents(known, 6) == {"copies": 6, "kept": None, "room": 4}, "also those of hosts that join later"
    assert told_to_agents(None, 6) == {"copies": 0, "kept": None, "room": 0}
    for one in hosts[:2]:
        one.answers = [{"has_room": True, "why": "two need 12 bytes, and are files in /tmp", "room_for_copies": 9}]
    why = "those of m, n; on m, two need 12 bytes, and are files in /tmp"
    assert copies.move_to_disk(6, 3) == (True, why) and hosts[0].asked[-1] == 6, "no more than all of them"
    assert HostCopies(hosts[2:], [WITH], 2, None).move_to_disk(2, 1) == (True, ""), "it has room in memory"


def test_hosts_use_the_slots_of_before_where_one_has_no_room():
    hosts = [Connection(1000, "m"), Connection(1000, "n", is_lost=True), Connection(1000, "m"), Connection(1000, "o")]
    hosts[2].answers[0] = {"has_room": False, "why": "two need 8 bytes, and may take 1", "room_for_copies": 1}
    known = CopyMemory(4)
    assert HostCopies(hosts, [WITH] * 4, 1, known).move_to_disk(4, 2) == (
        False,
        "on m, two need 8 bytes, and may take 1",
    )
    assert [one.asked for one in hosts] == [[8, 0], [], [8, 0], [0]], "two containers of one machine need twice as much"
    assert known.on_each_host_bytes == 0


def test_every_host_gives_its_memory_back():
    connections = [Connection(1000, "m", is_lost=True), Connection(1000, "n")]
    HostCopies(connections, [WITH, WITH], 2, None).close()
    assert connections[1].sent == ["forget"]
