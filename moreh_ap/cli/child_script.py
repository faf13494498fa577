"""Runs a user's script in a process of its own, for commands that record something of it."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path


def status_of(command: list[str], environment: dict[str, str]) -> int:
    """Runs a command and returns its exit status as a shell says it. Ctrl-C is the command's own."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # A child keeps signals that are ignored, so that it gets its handler back.
        child = subprocess.Popen(command, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, before))
        status = child.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def written_ns(file: Path) -> int | None:
    """Returns when a file was last written; None if there is none."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None
