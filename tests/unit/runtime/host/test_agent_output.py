"""What workers of another host say through inherited descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from moreh_ap.runtime.host.agent_output import WorkerPipes


def test_output_process_ids_and_ends_are_told(tmp_path):
    told = []
    pipes = WorkerPipes([2, 3], lambda kind, payload=b"", **values: told.append((kind, payload, values)))
    stdout, _ = pipes.streams[3]
    code = f"import os; os.write({pipes.pid_fd}, b'3 %d\\n' % os.getpid()); os.write({stdout}, b'said'); os._exit(7)"
    process = subprocess.Popen([sys.executable, "-c", code], close_fds=False)
    assert process.wait() == 7
    deadline_s = time.monotonic() + 5.0
    while not any(kind == "exit" for kind, _, _ in told) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    pipes.close()
    assert ("pid", b"", {"rank": 3, "pid": process.pid}) in told
    assert ("output", b"said", {"rank": 3, "name": "stdout"}) in told
    (code,) = [values["code"] for kind, _, values in told if kind == "exit"]
    assert code in (7, None), "None where the kernel does not say it any more"


def test_the_ends_of_all_workers_are_waited_for():
    told = []
    pipes = WorkerPipes([0], lambda kind, payload=b"", **values: told.append((kind, values)))
    process = subprocess.Popen(["sleep", "60"])
    os.write(pipes.pid_fd, b"0 %d\n" % process.pid)
    assert not pipes.await_ends(0.5), "it lives"
    process.kill()
    process.wait()
    assert pipes.await_ends(10.0)
    assert [kind for kind, _ in told] == ["pid", "exit"]
    ended = subprocess.Popen(["true"])
    ended.wait()
    os.write(pipes.pid_fd, b"0 %d\n" % ended.pid)
    assert pipes.await_ends(10.0)
    assert [kind for kind, _ in told] == ["pid", "exit"] * 2, "what a worker said just before its end"
    pipes.close()
