"""Which processes are ended with those that started them: all, or all but what forks workers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import subprocess, time
from moreh_ap.runtime.forking import descendants as found_below

warm = subprocess.Popen(["sh", "-c", "sleep 100 & setsid sleep 101 & wait"])  # a copy of it, and a worker
client = subprocess.Popen(["sleep", "102"])
def is_ready(found):
    return len(found) == 2 and found_below._group_of(found[1]) == found[1]

while not is_ready(found_below.descendants(warm.pid)):
    time.sleep(0.01)
copy, worker = found_below.descendants(warm.pid)
print(found_below.end_descendants(warm.pid))
while found_below.end_descendants(warm.pid):
    time.sleep(0.01)
print([found_below._lives(pid) for pid in (warm.pid, copy, worker, client.pid)])
print(found_below.end_descendants())
deadline_s = time.monotonic() + 10  # one whose parent ends first is not found any more while it ends
while any(map(found_below._lives, (warm.pid, copy, worker, client.pid))) and time.monotonic() < deadline_s:
    time.sleep(0.01)
print([found_below._lives(pid) for pid in (warm.pid, copy, worker, client.pid)])
"""


def test_all_are_ended_but_the_warm_parent_and_its_copies():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert done.stdout.splitlines() == ["2", str([True, True, False, False]), "2", str([False] * 4)], done.stderr
