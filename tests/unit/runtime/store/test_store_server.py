"""The store through which workers of several hosts meet, from PyTorch's side to the controller's."""

from __future__ import annotations

import datetime
import threading
import time

import pytest
import torch.distributed as dist

from moreh_ap.hosts.channel import Message
from moreh_ap.runtime.store.host_store import HostStore
from moreh_ap.runtime.store.store_relay import StoreRelay
from moreh_ap.runtime.store.store_server import StoreServer


@pytest.fixture
def make_store(tmp_path):
    """Makes stores of workers on two hosts that share one controller."""
    server, relays = StoreServer(1), []

    def make(host: str, timeout_s: float = 5.0) -> HostStore:
        (tmp_path / host).mkdir(exist_ok=True)

        def tell(kind, payload, **values):
            request, start = values.pop("request"), values.pop("start")
            server.ask(values, payload, lambda payload, **found: relay.answer(
                Message("store", {"request": request, "start": start, **found}, payload)
            ))  # fmt: skip

        relay = StoreRelay(tmp_path / host, 1, tell)
        relays.append(relay)
        return HostStore(relay.path, datetime.timedelta(seconds=timeout_s))

    make.relays = relays
    yield make
    for relay in relays:
        relay._server.shutdown()
        relay._server.server_close()


def test_it_does_what_pytorch_s_own_store_does(make_store):
    """The same operations on a `HashStore`, one after the other."""
    results = []
    for store in (make_store("a"), dist.HashStore()):
        store.set("key", "value")
        results.append(
            [
                store.get("key"),
                store.add("count", 2),
                store.add("count", 3),
                store.get("count"),
                store.check(["key", "count"]),
                store.check(["key", "no such"]),
                store.compare_set("key", "value", "next"),
                store.compare_set("key", "value", "third"),
                store.compare_set("new", "", "made"),
                store.get("new"),
                store.delete_key("new"),
                store.delete_key("new"),
                store.check(["new"]),
                store.num_keys(),
            ]
        )
    assert results[0] == results[1]


def test_a_host_waits_for_what_another_one_sets(make_store):
    here, there = make_store("a"), make_store("b")
    got = []
    thread = threading.Thread(target=lambda: got.append((here.wait(["x", "y"]), here.get("x"))))
    thread.start()
    there.set("x", b"\x00\n1")
    time.sleep(0.1)
    assert thread.is_alive()
    assert here.add("z", 1) == 1, "another thread is not held up"
    there.set("y", "")
    thread.join(5.0)
    assert got == [(None, b"\x00\n1")]


def test_a_wait_ends_and_its_late_answer_is_not_taken_for_another(make_store):
    store, other = make_store("a", timeout_s=0.2), make_store("b")
    with pytest.raises(dist.DistStoreError, match=r"within 0.2 s: get \['late'\]"):
        store.get("late")
    other.set("late", "1")
    other.set("key", "2")
    assert store.get("key") == b"2"


def test_the_socket_is_open_to_its_user_alone(make_store, tmp_path):
    make_store("a")
    assert (tmp_path / "a" / "store").is_socket()


def test_workers_of_an_earlier_start_are_not_answered(make_store):
    store, other = make_store("a", timeout_s=0.5), make_store("b")
    relay = make_store.relays[0]
    request = relay._tell
    other.set("key", "1")
    relay._tell = lambda kind, payload, **values: request(kind, payload, **{**values, "start": 2})
    with pytest.raises(dist.DistStoreError, match=r"within 0\.5 s"):
        store.get("key")
    relay.close()
    deadline_s = time.monotonic() + 10.0
    while relay._server.socket.fileno() >= 0:
        assert time.monotonic() < deadline_s, "the relay takes no more connections"
        time.sleep(0.05)
