"""Hosts try each other's ports, and send some bytes to see how fast they are."""

from __future__ import annotations

import socket

import pytest

from moreh_ap.hosts.reachability import Probe, connections, free_port, loopback_address, measure, reaches

HERE = "127.0.0.1"


@pytest.fixture
def probe():
    made = Probe(HERE)
    yield made
    made.close()


def test_a_port_is_reached_or_not(probe):
    assert reaches(HERE, probe.port) == ""
    assert "refused" in reaches(HERE, free_port(HERE))


def test_the_speed_of_a_connection_is_measured(probe):
    found = measure(HERE, probe.port)
    assert 0 < found.round_trip_s < 1.0 and found.bytes_per_s > 1e6
    with pytest.raises(OSError):
        measure(HERE, free_port(HERE))


def test_what_is_sent_is_never_sent_back_and_has_a_limit(probe):
    for said, answer in (((1).to_bytes(8, "big") + b"x", b"."), ((1 << 40).to_bytes(8, "big"), b""), (b"short", b"")):
        with socket.create_connection((HERE, probe.port), timeout=5.0) as connection:
            connection.sendall(said)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                assert stream.read() == answer


def test_several_connections_are_served_at_once(probe):
    with socket.create_connection((HERE, probe.port), timeout=5.0) as idle:
        assert reaches(HERE, probe.port) == "" and measure(HERE, probe.port).bytes_per_s > 0
        idle.sendall((1).to_bytes(8, "big") + b"x")
        assert idle.recv(1) == b"."


class Listener:
    """Stands for a socket to which strangers connect, of which one has gone again before it is let in."""

    def __init__(self) -> None:
        self.left: list[object] = ["first", OSError("it has gone"), "second"]

    def fileno(self) -> int:
        return 3 if self.left else -1

    def accept(self) -> tuple[object, None]:
        found = self.left.pop(0)
        if isinstance(found, OSError):
            raise found
        return found, None


def test_a_stranger_that_has_gone_again_ends_no_listening():
    assert list(connections(Listener())) == ["first", "second"]


@pytest.mark.parametrize(
    "addresses, found", [(["127.0.1.1"], "127.0.1.1"), (["10.0.0.2"], ""), (["::1", "10.0.0.2"], ""), (None, "")]
)
def test_a_name_that_stands_for_this_machine_alone_is_told_from_others(monkeypatch, addresses, found):
    def getaddrinfo(name, port):
        assert name == "node2", "the user is for ssh"
        if addresses is None:  # an alias of ssh
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (one, 0)) for one in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert loopback_address("me@node2") == found
