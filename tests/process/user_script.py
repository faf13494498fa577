"""Runs a Python script as a user does, in a process of its own, and finds what it leaves behind.

Every process that a script starts inherits a variable that names the run, so that leftovers are found also when their
parent is gone. Must not know what a script does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

from moreh_ap.local.cache_files import FOLDER_VARIABLE

SCRIPTS = Path(__file__).parent / "scripts"
GONE_WITHIN_S = 10.0
# No device is visible, so that workers are on the CPU wherever the tests run.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}
_RUN_VARIABLE = "MOREH_AP_TEST_RUN"
_WORKER_NAME = re.compile(r"moreh-worker-(\d+)\n")


class UserScript:
    """A script that is running, or has run; a context manager that ends whatever is left of it.

    Args:
        *arguments: What follows ``python``; names of files in `scripts` are found there.
        cwd: The working directory, which takes the output too.
        text: What it reads from standard input; None: what is written to `process.stdin` while it runs.
        **variables: Environment variables to set; None takes one away.
    """

    def __init__(self, *arguments: object, cwd: Path, text: str | None = "", **variables: str | None) -> None:
        self.id = uuid.uuid4().hex
        self.folder = cwd / f"run-{self.id[:8]}"
        self.folder.mkdir()
        known = {path.name for path in SCRIPTS.iterdir()}
        words = [str(SCRIPTS / word) if word in known else word for word in map(str, arguments)]
        kept = {FOLDER_VARIABLE: os.environ.get(FOLDER_VARIABLE)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MOREH_")}
        given = {**ENVIRONMENT, **kept, **variables}
        environment |= {_RUN_VARIABLE: self.id} | {name: value for name, value in given.items() if value is not None}
        (self.folder / "stdin").write_text(text or "")
        with (
            open(self.folder / "stdin") as stdin,
            open(self.folder / "stdout", "w") as stdout,
            open(self.folder / "stderr", "w") as stderr,
        ):
            self.process = subprocess.Popen(
                [sys.executable, *words],
                cwd=cwd,
                env=environment,
                stdin=subprocess.PIPE if text is None else stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                text=True,
            )

    def __enter__(self) -> UserScript:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def out(self) -> str:
        """What it has printed."""
        return (self.folder / "stdout").read_text()

    @property
    def err(self) -> str:
        """What it has printed as errors."""
        return (self.folder / "stderr").read_text()

    def wait(self, timeout_s: float = 150.0) -> int:
        """Returns the exit code once it has ended; fails with its output if that takes too long."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.out}\n{self.err}") from None

    def succeed(self, timeout_s: float = 150.0) -> str:
        """Returns its output once it has ended well and left no process behind."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}\n{self.out}\n{self.err}"
        self.leaves_nothing()
        return self.out

    def wait_for_output(self, text: str, timeout_s: float = 150.0) -> None:
        """Waits until it has printed `text`, which may begin with the end of the line before, also of none."""
        deadline_s = time.monotonic() + timeout_s
        while text not in f"\n{self.out}":
            assert self.process.poll() is None, f"ended before it printed {text!r}\n{self.out}\n{self.err}"
            assert time.monotonic() < deadline_s, f"no {text!r} after {timeout_s} s\n{self.out}\n{self.err}"
            time.sleep(0.02)

    def leaves_nothing(self) -> None:
        """Fails if a process of this run still lives `GONE_WITHIN_S` from now."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not left, f"processes {left} are left: {[_read(pid, 'cmdline') for pid in left]}"

    def processes(self) -> list[int]:
        """Ids of all living processes of this run."""
        return _living(f"{_RUN_VARIABLE}={self.id}")

    def workers(self) -> dict[int, int]:
        """Process ids of its workers, by rank."""
        return {rank_of(pid): pid for pid in self.processes() if rank_of(pid) >= 0}


def rank_of(pid: int) -> int:
    """Returns which worker process `pid` is, -1 if it is none."""
    name = _WORKER_NAME.fullmatch(_read(pid, "comm"))
    return -1 if name is None else int(name.group(1))


def _living(entry: str) -> list[int]:
    """Ids of the processes with `entry` in their environment; one that has ended but is not waited for has none."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if entry in _read(pid, "environ").split("\0")]


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
