"""An agent that was started by hand: who is let in."""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time

import pytest

from moreh_ap.hosts.channel import Channel
from moreh_ap.hosts.host_list import by_hand
from moreh_ap.hosts.ways import reach
from moreh_ap.runtime.host.host_connection import HostConnection, HostLostError
from moreh_ap.runtime.host.host_listener import HostListener


@pytest.fixture
def listener(monkeypatch):
    made = HostListener("127.0.0.1")
    made.started = []
    monkeypatch.setattr(
        "moreh_ap.runtime.host.host_listener.local_command",
        lambda: made.started.append(1) or ["cat"],  # stands for an agent: it says what it is told
    )
    threading.Thread(target=made.serve, daemon=True).start()
    yield made
    made.close()


def unverified():
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    return made


def first_byte(connection):
    """Returns what the other side says first; nothing where it breaks the connection off."""
    try:
        return connection.recv(1)
    except ConnectionError:
        return b""


def test_who_has_the_line_reaches_an_agent(listener):
    way = reach(listener.line)
    channel = Channel(way.reader, way.writer)
    channel.send("question", b"\x00\n" * 70_000, number=3)
    answer = channel.receive()
    assert (answer.kind, answer.values, answer.payload) == ("question", {"number": 3}, b"\x00\n" * 70_000)
    assert way.address == "127.0.0.1"
    way.close()


def test_a_second_script_is_told_that_another_is_served(listener, monkeypatch):
    monkeypatch.setattr("moreh_ap.runtime.host.host_listener.BUSY_S", 0.1)
    first = reach(listener.line)
    channel = Channel(first.reader, first.writer)
    channel.send("question")
    assert channel.receive().kind == "question"
    for _ in range(5):  # the connection ends at once, too: that is no other reason
        second = HostConnection(listener.line, reach(listener.line))
        with pytest.raises(HostLostError, match="serves another script"):
            second.await_report(5.0)
        second.end()
    first.close()
    deadline_s = time.monotonic() + 5.0
    while listener._busy.locked() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not listener._busy.locked(), "the next one is served"


@pytest.mark.parametrize("said", [b"", b"\n", b"wrong\n", b"x" * 5000, b"GET / HTTP/1.1\r\n\r\n"])
def test_a_stranger_without_the_token_starts_nothing(listener, said):
    address, port, _, _ = by_hand(listener.line)
    with socket.create_connection((address, port)) as plain:
        plain.settimeout(5.0)
        with unverified().wrap_socket(plain) as connection:
            connection.sendall(said)
            if not said.endswith(b"\n") and len(said) < 200:
                return  # it is turned away after a while
            assert first_byte(connection) == b""
    assert listener.started == []


def test_plain_tcp_and_older_tls_start_nothing(listener):
    address, port, _, token = by_hand(listener.line)
    with socket.create_connection((address, port)) as plain:
        plain.settimeout(5.0)
        plain.sendall(token.encode() + b"\n")
        assert token.encode() not in first_byte(plain)
    old = unverified()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection((address, port)) as plain, pytest.raises(ssl.SSLError):
        old.wrap_socket(plain)
    assert listener.started == []


def test_the_token_is_not_told_to_another_program_at_that_port(listener):
    """A foreign certificate: the fingerprint in the line is another one."""
    other = HostListener("127.0.0.1")
    heard = []
    other._introduce = lambda plain: heard.append(_first_words(other, plain))
    thread = threading.Thread(target=other.serve, daemon=True)
    thread.start()
    port = by_hand(other.line)[1]
    line = re.sub(r":\d+/", f":{port}/", listener.line, count=1)
    with pytest.raises(PermissionError, match="another program"):
        reach(line)
    for _ in range(100):
        if heard:
            break
        threading.Event().wait(0.05)
    other.close()
    assert heard == [b""]


def _first_words(listener, plain):
    try:
        with listener._context.wrap_socket(plain, server_side=True) as connection:
            connection.settimeout(5.0)
            return connection.recv(100)
    except OSError:
        return b""
