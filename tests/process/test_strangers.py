"""Another user of the machine reaches no socket of ours through which code could be run as the script's user."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from user_script import UserScript

AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which(AS_NOBODY[0]) is None,
    reason="acts as another user: run as root, with setpriv (Debian package util-linux)",
)

# What a stranger does with an address: attach to the engine that listens there and have a program of his run.
ATTACK = """
import os, sys
os.environ |= {"HYPERACTOR_MESH_ATTACH_CONFIG_TIMEOUT": "3s", "MONARCH_FILE_LOG": "error"}
import monarch.actor as ma
ma.unhandled_fault_hook = lambda fault: None
marker = sys.argv[2]
class Program(ma.Actor):
    @ma.endpoint
    def user(self):
        import os, pathlib
        pathlib.Path(marker).touch()
        return os.getuid()
try:
    hosts = ma.attach_to_workers(ca="trust_all_connections", workers=[sys.argv[1]])
    hosts.initialized.get(timeout=10)
    ran_as = hosts.spawn_procs(per_host={"gpus": 1}).spawn("program", Program).user.call().get(timeout=10)
    print("ran as", *ran_as.values(), flush=True)
except Exception as error:
    print("refused:", type(error).__name__, error, flush=True)
os._exit(0)
"""
RAN = "ran"  # the file that the stranger's program creates
UNPROTECTED = """
import monarch.actor as ma
ma.this_host()
print("listening", flush=True)
input()
"""


def listening(pids: list[int]) -> set[str]:
    """Returns the paths of all UNIX sockets at which the processes listen; abstract ones begin with @."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    paths = {row[6]: row[7] for row in rows if len(row) == 8 and row[3] == "00010000"}
    return {paths[inode] for pid in pids for inode in _sockets(pid) if inode in paths}


def _sockets(pid: int) -> list[str]:
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += re.findall(r"socket:\[(\d+)\]", os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def attack(path: str, cwd: Path) -> list[str]:
    """Returns what strangers reach at a socket: with no name of what listens there, and with the usual one.

    The engine sometimes ends the process of a stranger before that process has printed its answer. Such a stranger is
    sent again, so that each answer is of an attack that was carried out.
    """
    return [_answer(address, cwd) for address in (f"ipc://{path}", f"service@ipc://{path}")]


def _answer(address: str, cwd: Path) -> str:
    cwd.chmod(0o755)
    for _ in range(3):
        stranger = subprocess.run(
            [*AS_NOBODY, sys.executable, "-c", ATTACK, address, str(cwd / RAN)],
            cwd="/",
            env={**os.environ, "HOME": str(cwd), "USER": "nobody"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if stranger.stdout:
            return stranger.stdout
    return f"no answer, exit status {stranger.returncode}: {stranger.stderr[-2000:]}"


def may_connect(path: str) -> bool:
    """Returns whether a stranger can connect to the file of a socket."""
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({path!r})"
    done = subprocess.run([*AS_NOBODY, sys.executable, "-c", code], capture_output=True, cwd="/")
    assert done.returncode == 0 or b"PermissionError" in done.stderr, done.stderr.decode()
    return done.returncode == 0


def test_the_attack_succeeds_where_nothing_is_protected(tmp_path):
    """Without this, the test below would also pass with an attack that cannot work."""
    engine = subprocess.Popen(
        [sys.executable, "-c", UNPROTECTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert engine.stdout.readline() == b"listening\n"
        assert "ran as 0\n" in attack(sorted(listening([engine.pid]))[0], tmp_path)
        assert (tmp_path / RAN).exists()
    finally:
        engine.kill()
        engine.communicate()


def test_a_stranger_runs_no_code_through_our_sockets(tmp_path):
    with UserScript("train_forever.py", cwd=tmp_path, MOREH_NUM_DEVICES="2") as script:
        script.wait_for_output("step 10 ")
        controller, pids = script.process.pid, script.processes()
        paths = listening(pids)
        abstract = {path for path in paths if path.startswith("@")}
        assert len(paths - abstract) >= 4, "controller, supervisor and two workers have one each"
        assert not any(may_connect(path) for path in paths - abstract)
        assert not {path for path in listening([controller]) if path.startswith("@")}
        for path in abstract:
            answers = attack(path, tmp_path)
            assert all(answer.startswith("refused") for answer in answers), answers
            assert not (tmp_path / RAN).exists(), "not even by a stranger who got no answer"
        seen = len(script.out)
        script.wait_for_output("step ", timeout_s=10)
        assert script.process.poll() is None and len(script.out) >= seen, "the script goes on"


def test_may_connect_finds_an_open_socket(tmp_path):
    tmp_path.chmod(0o755)
    path = Path("/tmp") / f"moreh-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        assert may_connect(str(path))
    path.unlink()
