"""The process that stands for a worker, before a warm parent that the test plays."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

from moreh_ap.runtime.bootstrap import Launch
from moreh_ap.runtime.forking import warm_client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has descriptors of processes")


def start(path, *arguments: str, **options) -> subprocess.Popen:
    agent = str(os.getpid())
    return subprocess.Popen([sys.executable, "-S", warm_client.__file__, str(path), agent, *arguments], **options)


@pytest.fixture
def parent(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "warm"))
        listener.listen()
        listener.settimeout(30)
        yield listener, tmp_path / "warm"


def asked(listener: socket.socket) -> tuple[socket.socket, dict]:
    connection, _ = listener.accept()
    stream = connection.makefile("rb")
    return connection, json.loads(stream.read(int.from_bytes(stream.read(4), "big")))


@pytest.mark.parametrize(("status", "code"), [(0, 0), (7 << 8, 7), (signal.SIGKILL, -9), (signal.SIGSEGV | 128, -11)])
def test_it_ends_as_its_worker_ends(parent, status, code):
    listener, path = parent
    client = start(path, "the launch", "-m", "engine", env={**os.environ, "OF_THE_CLIENT": "ü\udcff"})
    connection, request = asked(listener)
    assert request["arguments"] == ["the launch", "-m", "engine"]
    assert request["environment"]["OF_THE_CLIENT"] == "ü\udcff"
    connection.sendall(f"{os.getpid()}\n".encode())
    connection.sendall(f"{int(status)}\n".encode())
    assert client.wait(30) == code


def test_it_passes_signals_on_and_lives(parent):
    listener, path = parent
    worker = subprocess.Popen(["sleep", "600"])
    client = start(path)
    connection, _ = asked(listener)
    connection.sendall(f"{worker.pid}\n".encode())
    mask, deadline_s = "", time.monotonic() + 30
    while int(mask or "0", 16) & 1 << signal.SIGTERM - 1 == 0:
        assert time.monotonic() < deadline_s
        with open(f"/proc/{client.pid}/status") as facts:
            mask = next(line.split()[1] for line in facts if line.startswith("SigCgt"))
    client.send_signal(signal.SIGTERM)
    assert worker.wait(30) == -signal.SIGTERM
    assert client.poll() is None
    connection.sendall(f"{int(signal.SIGTERM)}\n".encode())
    assert client.wait(30) == -signal.SIGTERM


def test_it_ends_its_worker_where_the_warm_parent_is_gone(parent):
    listener, path = parent
    worker = subprocess.Popen(["sleep", "600"])
    client = start(path)
    connection, _ = asked(listener)
    connection.sendall(f"{worker.pid}\n".encode())
    connection.close()
    assert worker.wait(30) == -signal.SIGKILL
    assert client.wait(30) == -signal.SIGKILL


OF_AN_AGENT = """
import os, subprocess, sys
client = subprocess.Popen([sys.executable, "-S", *sys.argv[1:], os.environ.get("AGENT", str(os.getpid()))])
print(client.pid, flush=True)
client.wait()
"""


@pytest.mark.parametrize("dies", ["while the worker runs", "before the client starts"])
def test_it_ends_with_its_agent(parent, dies):
    listener, path = parent
    command = [sys.executable, "-c", OF_AN_AGENT, warm_client.__file__, str(path)]
    another = {"AGENT": str(os.getpid())} if dies == "before the client starts" else {}
    agent = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **another})
    client = os.pidfd_open(int(agent.stdout.readline()))
    connection, _ = asked(listener)
    connection.sendall(f"{os.getpid()}\n".encode())
    if not another:
        assert not select.select([client], [], [], 0.5)[0]
        agent.kill()
    assert connection.recv(1) == b"", "which has the warm parent kill the worker"
    assert select.select([client], [], [], 30.0)[0]
    os.close(client)
    agent.wait(30)


@pytest.mark.parametrize("dies", ["before it listens", "before it forks"])
def test_it_becomes_the_worker_where_there_is_no_warm_parent(parent, tmp_path, dies):
    listener, path = parent
    reader, writer = os.pipe()
    with open(tmp_path / "out", "w") as out:
        launch = Launch(3, writer, out.fileno(), out.fileno(), (), ())
        arguments = [str(launch), "-m", "platform", "terse"]
        place = path if dies == "before it forks" else tmp_path / "nothing"
        client = start(place, *arguments, pass_fds=(writer, out.fileno()))
    if dies == "before it forks":
        asked(listener)[0].close()
    assert client.wait(30) == 0
    assert os.read(reader, 100) == f"3 {client.pid}\n".encode()
    assert (tmp_path / "out").read_text().startswith("Linux-")
    os.close(reader)
    os.close(writer)
