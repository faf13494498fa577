"""The exit status of a process that another part of the program collects, and the error for a worker that ended."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from moreh_ap.runtime.child_process import Child
from moreh_ap.runtime.launcher import Launcher, LaunchRequest

_LINUX = tuple(map(int, platform.release().split(".")[:2])) if sys.platform == "linux" else (0, 0)
tells = pytest.mark.skipif(_LINUX < (6, 15), reason="this kernel does not tell how a collected process ended")


def ended(how: str) -> Child:
    with subprocess.Popen(["sh", "-c", how]) as process:
        child = Child(process.pid)
        assert child.is_alive() and child.exit_code() is None
        process.wait()
    assert not child.is_alive()
    return child


def lost(child: Child, report: str | None) -> str:
    request = LaunchRequest(2, "cpu", 1, "", (), 1.0, 1.0)
    launcher = Launcher(request, is_stopping=lambda: True)
    launcher.engine = SimpleNamespace(cause_of_death=lambda rank: report)
    launcher._children[1] = child
    return str(launcher.find_dead())


@tells
@pytest.mark.parametrize(("how", "code"), [("sleep 0.1; exit 7", 7), ("sleep 0.1; kill -9 $$", -9)])
def test_the_exit_code_of_a_process_that_another_collected(how, code):
    child = ended(how)
    assert child.exit_code() == code
    child.close()
    assert child.exit_code() is None


@tells
def test_the_kernel_s_word_is_enough():
    message = lost(ended("sleep 0.1; kill -9 $$"), None)
    assert "Worker 1 of 2" in message and "died: killed by signal 9, Killed." in message and "dmesg" in message
    message = lost(ended("sleep 0.1; exit 7"), None)
    assert "died: exit code 7." in message and "dmesg" not in message


@pytest.mark.parametrize(
    ("report", "says"),
    [("Killed(sig=11)", "killed by signal 11"), ("Unreachable", "died: Unreachable."), (None, "died: cause unknown.")],
)
def test_the_engine_s_word_where_the_kernel_does_not_tell(report, says):
    child = ended("sleep 0.1")
    child.close()
    assert says in lost(child, report)
