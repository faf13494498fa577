"""How hosts that join are waited for, and that a Ctrl-C does not wait for them."""

from __future__ import annotations

import io
import signal
import threading
import time

import pytest

from moreh_ap.runtime.host import host_joining
from moreh_ap.runtime.host.host_joining import connect, on_all

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
