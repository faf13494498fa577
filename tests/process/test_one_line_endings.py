"""However a script ends, or its worker does: the right exit code, the right words, and no process left."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from user_script import UserScript

pytestmark = pytest.mark.rotating  # one more way to end each

SCRIPT = "train_forever.py"
TRAINING = "step 10 "
ONE, TWO = {"MOREH_NUM_DEVICES": "1"}, {"MOREH_NUM_DEVICES": "2"}
NO_OTHERS = {**TWO, "MOREH_RECOVERY": "off"}


def test_a_killed_worker_is_named_and_ends_the_script(tmp_path):
    with UserScript(SCRIPT, cwd=tmp_path, **NO_OTHERS) as script:
        script.wait_for_output(TRAINING)
        victim = script.workers()[1]
        os.kill(victim, signal.SIGKILL)
        start_s = time.monotonic()
        assert script.wait() == 1
        assert time.monotonic() - start_s < 10
        assert f"WorkerLostError: Worker 1 of 2 (process {victim}) died: killed by signal 9" in script.err
        assert 'train_forever.py", line ' in script.err, "the traceback begins at the script's own line"
        assert script.err.count("WorkerLostError") == 1 and script.err.count("See: docs/errors.md") == 1
        script.leaves_nothing()


def test_a_killed_supervisor_is_named_and_ends_the_script(tmp_path):
    with UserScript(SCRIPT, cwd=tmp_path, **NO_OTHERS) as script:
        script.wait_for_output(TRAINING)
        (supervisor,) = [pid for pid in script.processes() if _parent(pid) == script.process.pid]
        os.kill(supervisor, signal.SIGKILL)
        assert script.wait(timeout_s=15) == 1
        assert f"supervises the workers (process {supervisor}) died: killed by signal 9, Killed." in script.err
        assert script.err.count("WorkerLostError") == 1, script.err
        script.leaves_nothing()
        assert not _socket_folders(script.process.pid)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _socket_folders(pid: int) -> list[Path]:
    return [*Path(tempfile.gettempdir()).glob(f"moreh-{pid}-*")]


@pytest.mark.parametrize("send", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda send: send.name)
def test_a_signal_ends_a_script_in_mid_training(tmp_path, send):
    with UserScript(SCRIPT, cwd=tmp_path, **TWO) as script:
        script.wait_for_output(TRAINING)
        if send == signal.SIGINT:  # a terminal sends Ctrl-C to the whole process group
            os.killpg(script.process.pid, send)
        else:
            os.kill(script.process.pid, send)
        assert script.wait(timeout_s=5) == -send, script.err
        script.leaves_nothing()
        assert not _socket_folders(script.process.pid)
        assert ("KeyboardInterrupt" in script.err) == (send == signal.SIGINT)
        assert "WorkerLostError" not in script.err


@pytest.mark.parametrize("send", [signal.SIGTERM, signal.SIGKILL], ids=lambda send: send.name)
def test_a_signal_ends_a_script_whose_workers_are_starting(tmp_path, send):
    with UserScript(SCRIPT, cwd=tmp_path, **TWO) as script:
        script.wait_for_output("the line is behind us")
        os.kill(script.process.pid, send)
        assert script.wait(timeout_s=5) == -send, script.err
        script.leaves_nothing()


def test_whatever_a_script_waits_for_ends_when_it_is_stopped(tmp_path):
    """Calls that draw random numbers, losses on the workers' parts, and generation: Ctrl-C, then a killed worker."""
    with UserScript("work_forever.py", cwd=tmp_path, **NO_OTHERS) as script:
        for work in ("draw", "parts", "generate"):
            script.wait_for_output(f"{work} until KeyboardInterrupt round 3\n")
            os.killpg(script.process.pid, signal.SIGINT)
            script.wait_for_output(f"{work} was ended by KeyboardInterrupt", timeout_s=15)
            script.wait_for_output(f"{work} until WorkerLostError round 3\n")
            victim = max(script.workers().items())[1]
            os.kill(victim, signal.SIGKILL)
            died = f"Worker 1 of 2 (process {victim}) died: killed by signal 9"
            script.wait_for_output(f"{work} was ended by WorkerLostError {died}", timeout_s=15)
        assert script.wait(timeout_s=15) == 1
        assert script.err.count(died) == 1 and script.err.count("WorkerLostError") == 1, script.err
        assert 'work_forever.py", line ' in script.err, script.err
        script.leaves_nothing()


INTERRUPTED_IMPORT = """
import _imp, torch
torch.moreh.option.enable_advanced_parallelization()
_imp.acquire_lock()
raise KeyboardInterrupt
"""


def test_ctrl_c_in_the_middle_of_an_import_ends_the_script(tmp_path):
    """Ctrl-C can leave Python's import lock with the main thread, while the thread that starts workers imports too."""
    with UserScript("-c", INTERRUPTED_IMPORT, cwd=tmp_path, **TWO) as script:
        # Not -SIGINT: CPython forgets why it ends if modules are imported by another thread at exit.
        assert script.wait(timeout_s=15) != 0
        assert script.err.endswith("KeyboardInterrupt\n")
        script.leaves_nothing()


ENDS_EARLY = """
import time, torch
torch.moreh.option.enable_advanced_parallelization()
print(torch.ones(2).cuda().sum().item())
time.sleep({seconds})
"""


def test_a_script_that_ends_while_its_workers_start_is_told_nothing(tmp_path):
    """Whatever the background thread is at then: the imports, the processes, or their joining each other."""
    for seconds in (0.0, 0.4, 0.8, 1.2):
        with UserScript("-c", ENDS_EARLY.format(seconds=seconds), cwd=tmp_path, **TWO) as script:
            assert script.wait(timeout_s=30) == 0
            assert "2.0\n" in script.out and script.err == ""
            script.leaves_nothing()


def test_exit_codes_and_tracebacks_are_the_script_s_own(tmp_path):
    """Three scripts at once on one machine, each with an end of its own."""
    with (
        UserScript(SCRIPT, "exit", cwd=tmp_path, **ONE) as leaves,
        UserScript(SCRIPT, "raise", cwd=tmp_path, **TWO) as raises,
        UserScript(SCRIPT, "return", cwd=tmp_path, **ONE) as returns,
    ):
        assert leaves.wait() == 3
        assert raises.wait() == 1
        assert returns.wait() == 0
        assert raises.err.startswith("Traceback (most recent call last):\n")
        assert raises.err.endswith("LookupError: nothing was found\n")
        assert leaves.err == returns.err == ""
        for script in (leaves, raises, returns):
            assert "step 5 " in script.out
            script.leaves_nothing()


LOADERS_AT_EXIT = """
import atexit, threading, torch
@atexit.register
def look():
    for thread in threading.enumerate():
        if thread.name.startswith("monarch"):
            thread.join(10)
    print([thread.name for thread in threading.enumerate()])
torch.moreh.option.enable_advanced_parallelization()
model = torch.nn.Linear(4, 4).cuda()
loader = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8, num_workers=2, persistent_workers=True)
batches = iter(loader)
model(next(batches).cuda()).sum().backward()
print("trained")
"""


def test_loader_processes_may_still_live_at_the_end(tmp_path):
    """They hold the engine's connections open; its threads must not run on while Python ends: that can abort it."""
    with UserScript("-c", LOADERS_AT_EXIT, cwd=tmp_path, **TWO) as script:
        lines = script.succeed().splitlines()
        assert lines[-2:] == ["trained", "['MainThread']"], "threads are left after the engine's exit handlers"
        assert script.err == ""
