"""Stacks of another process, also while it holds the interpreter's lock in native code, or was stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moreh_ap.runtime.hangs import stack_dumps

PROGRAM = """
import ctypes, os, sys, time
from moreh_ap.runtime.hangs import stack_dumps

def read_with_the_lock():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def sleep():
    time.sleep(100)

if sys.argv[1] != "offers nothing":
    stack_dumps.offer()
print("ready", flush=True)
read_with_the_lock() if sys.argv[1] == "lock" else sleep()
"""


@pytest.fixture
def process(request) -> Iterator[subprocess.Popen[str]]:
    made = subprocess.Popen([sys.executable, "-c", PROGRAM, request.param], stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None and made.stdout.readline() == "ready\n"
    yield made
    made.kill()
    made.wait()
    made.stdout.close()


@pytest.mark.parametrize(
    "process, innermost", [("plain", "sleep"), ("lock", "read_with_the_lock")], indirect=["process"]
)
def test_a_process_says_where_it_is_without_the_interpreters_lock(process, innermost):
    frames: list[stack_dumps.Frame] = []
    for _ in range(20):  # it says that it is ready a moment before it sleeps
        found = stack_dumps.read({7: process.pid})
        (frames,) = stack_dumps.threads_of(found[7])
        if len(frames) == 2:
            break
    assert [frame.function for frame in frames] == [innermost, "<module>"] and frames[0].file == "<string>"
    assert process.poll() is None


@pytest.mark.parametrize("process", ["plain"], indirect=True)
def test_a_stopped_process_says_it_and_goes_on(process):
    os.kill(process.pid, signal.SIGSTOP)
    assert "in <module>\n" in stack_dumps.read({0: process.pid})[0]


@pytest.mark.parametrize("process", ["offers nothing"], indirect=True)
def test_a_process_that_offers_nothing_is_left_alone(process):
    assert stack_dumps.read({0: process.pid}, wait_s=0.5) == {0: ""}
    assert process.poll() is None


def test_each_thread_has_its_frames():
    text = """Thread 0x01 (most recent call first):
  File "a.py", line 3 in wait

Current thread 0x02 [main] (most recent call first):
  File "b c.py", line 4 in f
  File "d", line 5 in g
"""
    first, second = stack_dumps.threads_of(text)
    assert first == [("a.py", 3, "wait")] and second == [("b c.py", 4, "f"), ("d", 5, "g")]
