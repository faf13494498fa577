"""How hosts that join are waited for, and that a Ctrl-C does not wait for them."""

from __future__ import annotations

import io
import os
import signal
import socket
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.hosts import joining_checks, script_files
from moreh_ap.hosts.channel import Message
from moreh_ap.hosts.host_report import look
from moreh_ap.hosts.reachability import Speed
from moreh_ap.runtime.host import host_joining
from moreh_ap.runtime.host.host_connection import HostLostError
from moreh_ap.runtime.host.host_joining import Hosts, RunCredentials, connect, on_all, slowest_link

NOT_WAITED_S = 5.0


def test_all_are_done_at_the_same_time_and_answers_are_in_order():
    together = threading.Barrier(3, timeout=10.0)

    def work(number):
        together.wait()
        return 10 * number

    assert on_all([3, 1, 2], work) == [30, 10, 20]
    assert on_all([], work) == []


def test_the_first_error_is_raised_once_all_are_done():
    done = []

    def work(number):
        if number:
            raise ValueError(number)
        time.sleep(0.1)
        done.append(number)

    with pytest.raises(ValueError, match=r"^1$"):
        on_all([0, 1, 2], work)
    assert done == [0]


class SilentWay:
    """Streams to an agent that never says anything, until they are closed."""

    address = ""

    def __init__(self):
        self.closed = threading.Event()
        self.reader, self.writer = self, io.BytesIO()

    def readline(self, size=-1):
        self.closed.wait(60.0)
        return b""

    def last_words(self):
        return ""

    def close(self):
        self.closed.set()


def test_ctrl_c_while_hosts_join_ends_their_agents_and_waits_for_none(monkeypatch):
    ways = []

    def reach(host):
        ways.append(SilentWay())
        return ways[-1]

    monkeypatch.setattr(host_joining, "reach", reach)
    monkeypatch.setattr(host_joining, "JOIN_S", 60.0)
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
    start_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        connect(["node1", "node2"])
    assert time.monotonic() - start_s < NOT_WAITED_S
    assert len(ways) == 2 and all(way.closed.is_set() for way in ways)


class Answering:
    """A host that is used, or joins."""

    def __init__(self, name):
        self.host = self.name = name
        self.address = "127.0.0.1"
        self.report, self.arrived_s, self.delay_s = look(os.environ), time.time(), 0.0
        self.asked = []

    def ask(self, kind, timeout_s, **values):
        self.asked.append(kind)
        found = {
            "listen": {"interface": "lo", "files": "", "port": self.port(), "error": ""},
            "reach": {"failed": [""] * len(values.get("targets", ()))},
            "identities": {"identities": [list(script_files.identity_of(path)) for path in values.get("paths", ())]},
        }
        return Message(kind, found[kind])

    def port(self):
        self.listening = socket.create_server((self.address, 0))
        return self.listening.getsockname()[1]


class Lost(Answering):
    """A host whose agent ends after it has said what the host has."""

    def ask(self, kind, timeout_s, **values):
        raise HostLostError("no answer in 10 s", self.host)


def test_a_host_that_is_lost_while_hosts_are_looked_at_is_named():
    found = Hosts([Answering("a"), Lost("b")], [], script_folder=os.getcwd())
    host_joining._look_at_all(found, 1, "127.0.0.1", [])
    (row,) = [row for row in found.rows if not row.ok]
    assert (row.host, row.seen, row.fix) == ("b", "no answer in 10 s", 'ssh b "uptime"')
    assert joining_checks.error(found.rows).fact == "The host b cannot join: connection: no answer in 10 s."


def test_a_host_that_joins_is_compared_beside_those_that_are_used():
    used, new = Answering("a"), Answering("b")
    found = Hosts([new], [], script_folder=os.getcwd())
    host_joining._look_at_all(found, 1, "127.0.0.1", [used])
    assert found.connections == [new], "the others have joined before"
    assert all(row.ok for row in found.rows), found.rows
    what = {(row.host, row.what) for row in found.rows}
    assert {("b", "clock"), ("b", "reaches a"), ("a", "reaches b"), ("b", "script's folder")} <= what
    assert ("a", "clock") not in what and used.asked == ["listen", "reach"]
    for one in (used, new):
        one.listening.close()


def test_an_address_gets_credentials_later_only_where_hosts_may_join():
    first, later = Hosts([], [], "127.0.0.1"), Hosts([], [], "10.0.0.3")
    for may_join in (True, False):
        made = RunCredentials()
        made.of_hosts(first, others_may_join=may_join)
        assert set(made.of_hosts(first)) == {"127.0.0.1"}
        if may_join:
            assert made.of_hosts(later)["10.0.0.3"].authority == made.of_hosts(first)["127.0.0.1"].authority
        else:
            with pytest.raises(OptionError, match="other addresses"):
                made.of_hosts(later)


def test_the_link_of_a_host_that_joins_is_the_slower_direction_to_the_slower_neighbour():
    def host(name, speeds):
        def ask(kind, timeout_s, address, port):
            asked.append((name, kind, port))
            error = "" if address in speeds else "timed out"
            values = {"error": error} | ({} if error else asdict(Speed(*speeds[address])))
            return SimpleNamespace(values=values)

        return SimpleNamespace(host=name, name=name, address=name, ask=ask)

    asked = []
    new = host("d", {"a": (0.001, 8e6), "c": (0.002, 9e6)})
    used = [host("a", {"d": (0.003, 7e6)}), host("b", {}), host("c", {"d": (0.001, 9e6)})]
    found = Hosts([new], [], ports={"a": 1, "b": 2, "c": 3, "d": 4})
    assert slowest_link(found, used) == Speed(0.003, 7e6)
    assert asked == [("d", "measure", 3), ("c", "measure", 4), ("d", "measure", 1), ("a", "measure", 4)]
    asked.clear()
    assert slowest_link(found, used[:1]) == Speed(0.003, 7e6) and len(asked) == 2
    with pytest.raises(OSError, match="b cannot reach d: timed out"):
        slowest_link(Hosts([host("d", {"b": (1, 1)})], [], ports=found.ports), used[1:2])
