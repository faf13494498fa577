"""Whether a warm parent can fork workers, as the controller sees it: before it is ready, then, and at its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moreh_ap.runtime.forking.warm_parent_process import WarmParentProcess

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has descriptors of processes")


def started() -> tuple[WarmParentProcess, socket.socket]:
    """Returns one that an agent has started, and the other end of its connection."""
    made = WarmParentProcess(("json", "never_imported.module"))
    path, imports, descriptor = made.to_start()
    assert imports == ("json",)
    theirs = socket.socket(fileno=os.dup(descriptor))
    made.started()
    Path(path).touch()
    return made, theirs


@pytest.fixture
def warm_parent():
    """Returns what `started` returns; ends it."""
    made, theirs = started()
    yield made, theirs
    theirs.close()
    made.end()
    assert not Path(made.path).exists()


@pytest.fixture
def process():
    """Returns a process that the test plays the warm parent with."""
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        yield sleeping
        sleeping.kill()


def test_it_can_fork_from_its_word_to_its_end(warm_parent, process):
    seen, theirs = warm_parent
    assert (seen.can_fork(), seen.was_lost()) == (False, False)
    theirs.sendall(f"{process.pid}\n".encode())
    for _ in range(2):  # the processes of which it is a copy keep the connection open
        seen.await_imports(lambda: pytest.fail("it is ready"))
    assert (seen.can_fork(), seen.was_lost()) == (True, False)
    assert seen.to_start() == ("", (), -1), "there is one for any other agent"
    process.kill()
    process.wait()
    assert (seen.can_fork(), seen.was_lost()) == (False, True)


def test_one_that_cannot_fork_was_never_lost(warm_parent):
    seen, theirs = warm_parent
    theirs.close()
    seen.await_imports(lambda: False)
    assert (seen.can_fork(), seen.was_lost()) == (False, False)


def test_it_is_ended_even_before_its_word_is_read(process):
    seen, theirs = started()
    theirs.sendall(f"{process.pid}\n".encode())
    theirs.close()
    seen.end()
    assert process.wait(30) == -signal.SIGKILL


def test_a_wait_ends_with_the_script(warm_parent):
    seen, _ = warm_parent
    seen.await_imports(lambda: True)
    assert not seen.can_fork()
