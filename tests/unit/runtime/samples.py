"""Processes that have ended."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from moreh_ap.runtime.child_process import Child

_LINUX = tuple(map(int, platform.release().split(".")[:2])) if sys.platform == "linux" else (0, 0)
tells = pytest.mark.skipif(_LINUX < (6, 15), reason="this kernel does not tell how a collected process ended")


def ended(how: str) -> Child:
    with subprocess.Popen(["sh", "-c", how]) as process:
        child = Child(process.pid)
        assert child.is_alive() and child.exit_code() is None
        process.wait()
    assert not child.is_alive()
    return child
