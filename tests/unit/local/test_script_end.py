"""A script that ends waits before its exit handlers run, as long as something goes on that they rely on."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, threading, time
from moreh_ap.local.script_end import exit_waits

def work():
    with exit_waits():
        begun.set()
        time.sleep(0.6)
        print("done", flush=True)

begun = threading.Event()
atexit.register(print, "exit handler")
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


def test_exit_handlers_run_after_what_has_begun():
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.split("\n")) == (0, ["done", "exit handler", ""]), ended.stderr
