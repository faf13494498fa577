"""Agents on loopback that stand for several hosts: a script is told of them, and none is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "scripts" / "with_hosts.py"

SCRIPT = """
import os, sys
from moreh_ap.hosts.host_list import by_hand, parse_hosts
path = os.environ["MOREH_HOSTS"]
hosts = parse_hosts(path)
assert oct(os.stat(path).st_mode & 0o777) == "0o600"
import socket
for host in hosts:
    socket.create_connection(by_hand(host)[:2]).close()
print(len(hosts), path, *(by_hand(host)[1] for host in hosts))
sys.exit(7)
"""


def test_a_script_is_told_of_agents_that_listen_and_end_with_it():
    command = [sys.executable, PROGRAM, "2", "--", sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    num_hosts, path, *ports = done.stdout.split()
    assert num_hosts == "2" and len(set(ports)) == 2
    assert not os.path.exists(path)
    listening = {int(line.split()[1].split(":")[1], 16) for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                 if line.split()[3] == "0A"}  # fmt: skip
    assert not listening & set(map(int, ports))


@pytest.mark.parametrize("arguments", [["0", "--", "true"], ["2"], ["2", "--"]])
def test_what_cannot_be_is_refused(arguments):
    done = subprocess.run([sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "at least 1" in done.stderr
