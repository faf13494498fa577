"""Which files of the package run in one training step: in this process, and in the workers.

A worker is traced by having it import `step_trace_begin` before the step and `step_trace_end` after it, as the command
`ImportModules` does in the thread that executes commands.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import moreh_ap

PACKAGE = f"{Path(moreh_ap.__file__).parent}{os.sep}"


class FileTrace:
    """The files of the package whose functions were called, in the order of their first call; for `sys.setprofile`.

    Attributes:
        files: Their paths below the package.
        changes: How often a function was called in another file than the last one.
    """

    def __init__(self) -> None:
        self.files: list[str] = []
        self.changes = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        name = path.removeprefix(PACKAGE)
        if name != self._last:
            self._last = name
            self.changes += 1
        if name not in self.files:
            self.files.append(name)


OF_THIS_PROCESS = FileTrace()
"""What a worker traces."""


def result_file(pid: int) -> Path:
    """Where the worker with this process id leaves its trace, a file a line."""
    return Path(tempfile.gettempdir()) / f"moreh-step-trace-{pid}"
