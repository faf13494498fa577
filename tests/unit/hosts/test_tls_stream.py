"""A TLS connection that two threads use at once."""

from __future__ import annotations

import os
import socket
import ssl
import threading

import pytest

from moreh_ap.hosts.certificates import make_credentials
from moreh_ap.hosts.credentials import fingerprint
from moreh_ap.hosts.tls_stream import TlsStream

PIECES = [os.urandom(size) for size in (1, 70_000, 3, 1 << 20, 16_384, 5)]


@pytest.fixture
def ends(tmp_path):
    """Both ends of a connection, and the certificate of the one that serves."""
    own = make_credentials(["127.0.0.1"])["127.0.0.1"]
    (tmp_path / "certificate").write_text(own.certificate)
    (tmp_path / "key").write_text(own.key)
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    here, there = socket.socketpair()
    made = []
    thread = threading.Thread(target=lambda: made.append(TlsStream(there, server_context, server_side=True)))
    thread.start()
    client = TlsStream(here, context)
    thread.join()
    yield client, made[0], own
    client.close()
    made[0].close()


def read(stream, size):
    got = b""
    while len(got) < size:
        piece = stream.read(size - len(got))
        assert piece
        got += piece
    return got


def test_both_directions_at_once(ends):
    """Large pieces fill the buffers of the sockets: who sends must not keep the same end from reading."""
    client, server, _ = ends
    got = {}

    def send(stream):
        for piece in PIECES:
            stream.write(piece)

    def receive(name, stream):
        got[name] = [read(stream, len(piece)) for piece in PIECES]

    threads = [threading.Thread(target=send, args=(stream,)) for stream in (client, server)]
    threads += [threading.Thread(target=receive, args=pair) for pair in (("client", client), ("server", server))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert got == {"client": PIECES, "server": PIECES}


def test_a_thread_that_waits_for_bytes_keeps_no_other_from_sending(ends):
    client, server, _ = ends
    reader = threading.Thread(target=lambda: client.read(1), daemon=True)
    reader.start()
    for number in range(3):
        client.write(bytes([number]))
        assert server.read(1) == bytes([number])
    assert reader.is_alive()
    server.write(b"x")
    reader.join(10)
    assert not reader.is_alive()


def test_the_certificate_is_that_of_the_other_end(ends):
    client, server, own = ends
    assert fingerprint(client.certificate()) == fingerprint(ssl.PEM_cert_to_DER_cert(own.certificate))
    assert server.certificate() == b""


def test_an_end_wakes_the_thread_that_reads(ends):
    client, server, _ = ends
    ended = []

    def wait():
        try:
            ended.append(client.read(1))
        except OSError as error:
            ended.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    server.shut()
    reader.join(10)
    assert not reader.is_alive() and ended and not (isinstance(ended[0], bytes) and ended[0])


def test_altered_bytes_are_an_error(ends):
    client, server, _ = ends
    server.plain.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    with pytest.raises(ssl.SSLError):
        client.read(1)
