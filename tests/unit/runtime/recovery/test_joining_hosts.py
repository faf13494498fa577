"""Hosts that join during a run: which are tried, and what is said of those that cannot join."""

from __future__ import annotations

import time

import pytest

from moreh_ap.hosts.joining_checks import Row
from moreh_ap.hosts.reachability import Speed
from moreh_ap.runtime.host.host_joining import Hosts
from moreh_ap.runtime.recovery import joining_hosts
from moreh_ap.runtime.recovery.joining_hosts import JoiningHosts

SPEED = Speed(0.001, 25e6)


class Connection:
    def __init__(self, host):
        self.host, self.reason, self.has_ended, self.link = host, None, False, None

    def lost(self):
        return self.reason

    def end(self):
        self.has_ended = True

    end_soon = end


class Pool:
    """Hosts that answer, except those in `wrong`."""

    def __init__(self, given, file="", wrong=None):
        self.given, self.file, self.refused, self.wrong = given, file, set(), wrong or {}
        self.said, self.tried, self.made = [], [], []
        self.say = self.said.append

    def connect(self, host, beside):
        self.tried.append((host, [one.host for one in beside]))
        if self.wrong.get(host) == "answer":
            return Hosts([], [Row(host, "answer", "no route", "", False)])
        self.made.append(Connection(host))
        return Hosts([self.made[-1]], [Row(host, self.wrong.get(host, "clock"), "seen", "", host not in self.wrong)])


@pytest.fixture
def joining(monkeypatch):
    monkeypatch.setattr(joining_hosts, "LOOK_S", 0.01)
    monkeypatch.setattr(joining_hosts, "slowest_link", lambda found, used: SPEED)
    made = []

    def make(pool, used):
        made.append(JoiningHosts(pool, lambda: used))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_for(condition):
    deadline_s = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_host_that_is_not_used_is_tried_beside_those_that_are(joining):
    pool, used = Pool(["a", "b", "kubernetes:train-1"]), [Connection("a")]
    found = joining(pool, used)
    wait_for(found.waiting)
    assert pool.tried == [("b", ["a"])] and [one.host for one in found.waiting()] == ["b"]
    wait_for(lambda: pool.said)
    assert pool.said == ["b can join over a link of 25 MB/s, and does so after the next copy of what workers hold"]
    assert found.waiting()[0].link == SPEED
    found.waiting()[0].reason = "the connection has ended"
    wait_for(lambda: len(pool.made) == 2)
    wait_for(lambda: pool.made[0].has_ended)  # it is tried again
    wait_for(found.waiting)
    used.append(found.waiting()[0])
    found.take(used)
    assert found.waiting() == [] and not used[1].has_ended


def test_a_host_whose_link_cannot_be_measured_joins_all_the_same(joining, monkeypatch):
    def fail(found, used):
        raise OSError("b cannot reach a: timed out")

    pool = Pool(["a", "b"])
    found = joining(pool, [Connection("a")])
    monkeypatch.setattr(joining_hosts, "slowest_link", fail)
    wait_for(found.waiting)
    assert found.waiting()[0].link is None
    wait_for(lambda: pool.said)
    assert "b can join (its link was not measured: b cannot reach a: timed out), and" in pool.said[0]


def test_hosts_that_the_file_names_since_are_tried(joining, tmp_path):
    file = tmp_path / "hosts.txt"
    file.write_text("a\n")
    pool = Pool(["a"], str(file))
    found = joining(pool, [Connection("a")])
    file.write_text("a\nb c\n")  # the line is not finished
    wait_for(lambda: pool.said)
    assert "cannot be read as a list of hosts" in pool.said[0] and pool.tried == []
    file.write_text("a\nb\n")
    wait_for(found.waiting)
    assert pool.tried == [("b", ["a"])]


def test_what_keeps_a_host_from_joining_is_said_once(joining):
    pool = Pool(["lost", "late"], wrong={"lost": "answer", "late": "clock"})
    joining(pool, [])
    wait_for(lambda: len(pool.tried) > 5)
    assert pool.said == ["The host late cannot join: clock: seen."], "of a lost one, nothing"
    assert all(one.has_ended for one in pool.made[:-1])


def test_hosts_that_were_refused_are_not_tried_and_those_that_wait_end(joining):
    pool = Pool(["a", "b"])
    pool.refused = {"a"}
    found = joining(pool, [])
    wait_for(found.waiting)
    found.close()
    assert [host for host, _ in pool.tried] == ["b"] and pool.made[0].has_ended and found.waiting() == []
