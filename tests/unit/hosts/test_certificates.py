"""Certificates for one run: who gets in, and where keys are."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import threading

import pytest

from moreh_ap.hosts.certificates import Authority, make_credentials
from moreh_ap.hosts.credentials import ENGINE_VARIABLES

HERE = "127.0.0.1"


def context(purpose, credentials, tmp_path):
    made = ssl.SSLContext(purpose)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=credentials.authority)
    pair = tmp_path / str(purpose)
    pair.write_text(credentials.certificate + credentials.key)
    made.load_cert_chain(pair)
    return made


def meet(server, client, tmp_path):
    """Returns what two processes with these credentials come to, a strict server and a strict client at 127.0.0.1."""
    listening = socket.create_server((HERE, 0))

    def serve():
        plain, _ = listening.accept()
        try:
            with context(ssl.PROTOCOL_TLS_SERVER, server, tmp_path).wrap_socket(plain, server_side=True) as connection:
                connection.sendall(b"in")
        except (ssl.SSLError, OSError):
            plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with socket.create_connection(listening.getsockname()) as plain:
            made = context(ssl.PROTOCOL_TLS_CLIENT, client, tmp_path)
            with made.wrap_socket(plain, server_hostname=HERE) as connection:
                return connection.recv(2)
    finally:
        thread.join()
        listening.close()


def test_processes_of_a_run_meet(tmp_path):
    run = make_credentials([HERE, "10.0.0.2"])
    assert meet(run[HERE], run["10.0.0.2"], tmp_path) == b"in"


def test_another_run_and_another_address_do_not(tmp_path):
    run, other = make_credentials([HERE, "10.0.0.2"]), make_credentials([HERE])
    with pytest.raises(ssl.SSLError):
        meet(run[HERE], other[HERE], tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        meet(run["10.0.0.2"], run[HERE], tmp_path)


def test_a_key_is_in_no_variable_and_open_in_no_program_that_is_started():
    variables = make_credentials([HERE])[HERE].as_files()
    assert tuple(variables) == ENGINE_VARIABLES
    path = variables["HYPERACTOR_TLS_KEY"]
    with open(path) as file:
        assert "PRIVATE KEY" in file.read()
    child = subprocess.run([sys.executable, "-c", f"open({path!r})"], env={**os.environ, **variables}, close_fds=False)
    assert child.returncode != 0
    assert "PRIVATE" not in repr(make_credentials([HERE])[HERE])


def test_a_process_that_joins_later_meets_the_others_of_its_run(tmp_path):
    run = Authority()
    assert meet(run.credentials(HERE), run.credentials("10.0.0.3"), tmp_path) == b"in"
