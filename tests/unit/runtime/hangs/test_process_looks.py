"""States and processor time of processes, as the kernel has them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from moreh_ap.runtime.hangs.process_looks import STOPPED, look_at, processor_s_of_children


def test_a_stopped_process_and_one_that_is_gone_are_known():
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert look_at(child.pid).state != STOPPED
        os.kill(child.pid, signal.SIGSTOP)
        until_s = time.monotonic() + 10
        while look_at(child.pid).state != STOPPED:
            assert time.monotonic() < until_s
    finally:
        child.kill()
        child.wait()
    assert look_at(child.pid) is None


def test_what_a_process_computes_counts_and_what_its_children_do():
    before = look_at(os.getpid()).processor_s
    children = processor_s_of_children(os.getpid())
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        until_s = time.process_time() + 0.1
        while time.process_time() < until_s:
            pass
        assert look_at(os.getpid()).processor_s >= before + 0.08
        until_s = time.monotonic() + 60
        while processor_s_of_children(os.getpid()) < children + 0.1:
            assert time.monotonic() < until_s
    finally:
        child.kill()
        child.wait()
