"""What an agent says of its workers."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from moreh_ap.runtime.host.worker_usage import WorkerUsage


def test_memory_at_once_and_busy_cores_from_the_second_look_on():
    usage, pid = WorkerUsage(), os.getpid()
    first = usage.look({3: pid})
    assert 0 < first["free_bytes"] < first["memory_bytes"] <= psutil.virtual_memory().total
    ((rank, found, used_bytes, busy),) = first["workers"]
    assert (rank, found, busy) == (3, pid, None)
    resident = psutil.Process(pid).memory_info().rss
    assert 0.5 * resident < used_bytes < 2 * resident
    begun_s = sum(os.times()[:2])
    while sum(os.times()[:2]) - begun_s < 0.2:  # of CPU time, however busy the machine is
        pass
    ((*_, busy),) = usage.look({3: pid})["workers"]
    assert busy > 0.0


def test_a_process_that_has_ended_is_left_out():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert WorkerUsage().look({0: process.pid, 1: os.getpid()})["workers"][0][0] == 1
