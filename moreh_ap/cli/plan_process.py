"""The process in which `moreh-ap plan train.py` runs the script.

Decides how it begins and ends. Must not know what it does.

[Note: a process of its own]
A script may start threads and processes, and register what runs at the end. So it runs in a process and a session of
its own, which ends without running any of that, and whose group is ended with it. Should the command be killed, the
kernel ends that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

from moreh_ap.runtime.child_process import end_with

_GOES_S = 3.0


def in_a_process(options: dict[str, Any], script: str, arguments: list[str]) -> int:
    """Returns the exit status of a process that plans a script. See [Note: a process of its own].

    Args:
        options: Values of the command's arguments, as JSON can say them.
        script: The file.
        arguments: Those of the script.
    """
    child = subprocess.Popen(
        _command(options, script, arguments),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(end_with, os.getpid()) if sys.platform == "linux" else None,
    )
    try:
        return child.wait()
    except KeyboardInterrupt:
        print(f"{script}: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        _end(child)


def _command(options: dict[str, Any], script: str, arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "moreh_ap.cli.plan_script", json.dumps(options), script, *arguments]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it has started; those that it has started are in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_GOES_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
