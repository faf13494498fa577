"""Python stacks of a worker, which its controller has without the worker's help.

Decides how they are asked for and where they are written. Must not know why anybody wants them.

[Note: stacks of a process that hangs]
The handler of the signal is C code of Python's `faulthandler`: it runs while another thread holds the interpreter's
lock, or the process waits in native code. It writes into memory of the worker, which its controller opens by the
worker's list of descriptors. A process that was stopped takes the signal when it goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_NAME = "moreh-stacks"
_POLL_S = 0.05
_HEAD = re.compile(r"^(?:Current thread|Thread) 0x\w+.*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    function: str


def offer() -> None:
    """Has this process write the stacks of all its threads where `read` finds them, whenever it is asked to."""
    if sys.platform == "linux":
        faulthandler.register(signal.SIGUSR2, file=os.memfd_create(_NAME), all_threads=True)


def read(pids: Mapping[int, int], wait_s: float = 3.0) -> dict[int, str]:
    """Returns the stacks of processes that offer them; "" where one says nothing.

    Args:
        pids: Process ids, by whatever the answer is to be found under. Those that are stopped go on.
        wait_s: How long they may take.
    """
    memory = {key: _memory_of(pid) for key, pid in pids.items()}
    before = {key: _size(descriptor) for key, descriptor in memory.items()}
    for key, pid in pids.items():
        if memory[key] is not None:  # the signal would end a process that does not handle it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                os.kill(pid, signal.SIGCONT)
    deadline_s, sizes = time.monotonic() + wait_s, dict(before)
    while time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
        now = {key: _size(descriptor) for key, descriptor in memory.items()}
        if now == sizes and all(now[key] > before[key] for key in memory if memory[key] is not None):
            break
        sizes = now
    found = {}
    for key, descriptor in memory.items():
        found[key] = ""
        if descriptor is not None:
            found[key] = os.pread(descriptor, sizes[key] - before[key], before[key]).decode(errors="replace")
            os.close(descriptor)
    return found


def threads_of(stacks: str) -> list[list[Frame]]:
    """Returns the frames of each thread, innermost first."""
    return [
        [Frame(file, int(line), function) for file, line, function in _FRAME.findall(part)]
        for part in _HEAD.split(stacks)[1:]
    ]


def _memory_of(pid: int) -> int | None:
    """Returns a descriptor of the memory into which a process writes its stacks."""
    with contextlib.suppress(OSError):  # it is gone
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                    return os.open(path, os.O_RDONLY)
    return None


def _size(descriptor: int | None) -> int:
    return 0 if descriptor is None else os.fstat(descriptor).st_size
