"""The process of a script's plan: its status, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from moreh_ap.cli import plan_command, plan_process
from moreh_ap.cli.main import main

CHILD = """
import os, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1], "w").write(str(started.pid))
time.sleep(300 if sys.argv[2] == "stays" else 0)
os._exit(5)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("ends", "status"), [("leaves", 5), ("stays", 130)])
def test_the_status_is_that_of_the_process_and_what_it_started_ends_with_it(ends, status, monkeypatch, tmp_path):
    file = tmp_path / "pid"
    monkeypatch.setattr(plan_process, "_command", lambda *_: [sys.executable, "-c", CHILD, str(file), ends])

    def interrupt(*_: object) -> None:
        if not file.exists() or not file.read_text():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        if ends == "stays":
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert plan_process.in_a_process({}, "train.py", []) == status
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    deadline = time.monotonic() + 10
    while is_running(int(file.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(file.read_text()))


def test_the_process_gets_options_script_and_arguments():
    command = plan_process._command({"top": 5, "devices": None}, "train.py", ["--lr", "1"])
    assert command[0] == sys.executable and command[4:] == ["train.py", "--lr", "1"]
    assert json.loads(command[3]) == {"top": 5, "devices": None}
    assert os.path.isfile(Path(plan_process.__file__).with_name(command[2].rpartition(".")[2] + ".py"))


def test_options_behind_a_script_are_the_script_s_and_one_line_says_so(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(plan_command, "in_a_process", lambda *given: calls.append(given) or 0)
    assert main(["plan", "--devices", "8xH100", "train.py", "--lr", "1"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["plan", "train.py", "--devices", "8xH100", "--lr=1"]) == 0
    assert capsys.readouterr().err == "train.py gets --devices: options of moreh-ap plan stand before it\n"
    assert [given[2] for given in calls] == [["--lr", "1"], ["--devices", "8xH100", "--lr=1"]]
