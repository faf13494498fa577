"""Which processes an agent ends: all, or all but what forks workers."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import subprocess, time
from moreh_ap.runtime.host import agent

warm = subprocess.Popen(["sh", "-c", "sleep 100 & setsid sleep 101 & wait"])  # a copy of it, and a worker
client = subprocess.Popen(["sleep", "102"])
def is_ready(found):
    return len(found) == 2 and agent._group_of(found[1]) == found[1]

while not is_ready(agent._descendants(warm.pid)):
    time.sleep(0.01)
copy, worker = agent._descendants(warm.pid)
print(agent.end_workers(warm.pid))
while agent.end_workers(warm.pid):
    time.sleep(0.01)
print([agent._lives(pid) for pid in (warm.pid, copy, worker, client.pid)])
print(agent.end_workers())
while agent.end_workers():
    time.sleep(0.01)
print([agent._lives(pid) for pid in (warm.pid, copy, worker, client.pid)])
"""


def test_all_are_ended_but_the_warm_parent_and_its_copies():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert done.stdout.splitlines() == ["2", str([True, True, False, False]), "2", str([False] * 4)], done.stderr
