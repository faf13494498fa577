"""Who may connect to the relay of a host, and what happens to values for which the host has no memory."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time

import pytest

from moreh_ap.hosts.certificates import make_credentials
from moreh_ap.hosts.credentials import context_of
from moreh_ap.protocol.encoding import Packed
from moreh_ap.runtime.engine_error import EngineError
from moreh_ap.runtime.relay.frames import MISSING
from unit.runtime.relay.samples import HERE, running

TIMEOUT_S = 20.0


def links_with(run, credentials):
    return run.connected(context_of(credentials.as_files(), is_server=False))


def _ends(stranger):
    stranger.settimeout(TIMEOUT_S)
    try:
        return stranger.recv(1) == b""
    except ssl.SSLError:
        return True


def test_only_who_shows_a_certificate_of_the_run_is_let_in_and_only_once(tmp_path):
    with running(tmp_path, 1, 1) as run:
        run.serve(lambda *_: ("done", None))
        port = run.relays[0].port
        with pytest.raises(EngineError, match="CERTIFICATE_VERIFY_FAILED"):
            links_with(run, make_credentials([HERE])[HERE])  # another run's
        nothing = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nothing.check_hostname, nothing.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((HERE, port)) as plain, nothing.wrap_socket(plain) as stranger:
            assert _ends(stranger), "a client hears after the handshake of TLS 1.3 that it had to show a certificate"
        assert run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)[0].status == "done"
        with pytest.raises(OSError):
            socket.create_connection((HERE, port), timeout=1.0).close()


def test_a_host_is_recognised_by_its_address(tmp_path):
    elsewhere = make_credentials(["10.9.9.9"])["10.9.9.9"]
    with running(tmp_path, 1, 1) as run:
        run.relays[0]._to_here = context_of(elsewhere.as_files(), is_server=True)
        with pytest.raises(EngineError, match="takes no commands"):
            links_with(run, elsewhere)


def test_values_are_in_the_memory_of_the_host_before_the_command_that_needs_them(tmp_path):
    value = os.urandom(5 << 20)
    with running(tmp_path) as run:
        run.serve(lambda rank, *_: ("done", os.pread(run.memories[rank // 2], len(value), 4096)))
        run.links.keep(None, 1, 4096, value)
        assert list(run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S).values()) == [value] * len(run.sockets)


def test_workers_are_told_which_value_their_host_had_no_memory_for(tmp_path, monkeypatch):
    def pwrite(*_):
        raise OSError("no space left")

    with running(tmp_path) as run:
        monkeypatch.setattr(os, "pwrite", pwrite)
        run.links.keep(0, 42, 0, b"value")  # for the first host only
        for worker in run.sockets[:2]:
            frame = worker.receive()
            assert (frame.kind, frame.number) == (MISSING, 42)
        with pytest.raises(OSError, match="had no memory for a value"):
            run.relays[0].read_value(42, 0, 5)
        monkeypatch.undo()
        os.pwrite(run.memories[0], b"value", 3)
        assert run.relays[0].read_value(43, 3, 5) == b"value"


def test_a_closed_relay_takes_no_connection_and_writes_nothing_more(tmp_path):
    with running(tmp_path, 2, 1) as run:
        run.serve(lambda *_: ("done", None))
        run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)
        for relay in run.relays:
            relay.close()
            for path, kind in ((relay.path, socket.AF_UNIX), ((HERE, relay.port), socket.AF_INET)):
                with pytest.raises(OSError), socket.socket(kind) as late:
                    late.connect(path)
        os.pwrite(run.memories[0], b"before", 0)
        run.links.keep(None, 1, 0, b"after!")
        run.relays[0].close()
        assert os.pread(run.memories[0], 6, 0) == b"before"


def test_a_relay_closes_whose_workers_have_never_connected(tmp_path):
    with running(tmp_path, 1, 2) as run:
        relay = run.relays[0]
        relay._num_workers = 3  # one of them has died
        assert run.links is not None  # it says what is below it
        deadline_s = time.monotonic() + TIMEOUT_S
        while relay._follower is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        relay.close()
        assert not relay._follower.is_alive()


def test_a_relay_knows_which_of_its_workers_have_not_answered_the_oldest_command(tmp_path):
    waiting = threading.Event()

    def answer(rank, number, command):
        if (rank, number) == (3, 2):
            waiting.wait(TIMEOUT_S)
        return "done", None

    with running(tmp_path, 2, 2) as run:
        run.serve(answer)
        assert run.relays[1].oldest() == (None, [])
        run.links.execute(1, 0, Packed(b"")).wait(TIMEOUT_S)
        second, third = run.links.execute(2, 0, Packed(b"")), run.links.execute(3, 0, Packed(b""))
        deadline_s = time.monotonic() + TIMEOUT_S
        while [relay.oldest() for relay in run.relays] != [(None, []), (2, [1])]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        waiting.set()
        for pending in (second, third):
            pending.wait(TIMEOUT_S)
        assert run.relays[1].oldest() == (None, [])
