"""What workers say when they are asked for their stacks: whether they wait in a collective, and do nothing else.

Decides what a stack has to look like for that. Must not know how long anybody has waited, nor who asks.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Mapping
from typing import NamedTuple

from moreh_ap.runtime.hangs import stack_dumps
from moreh_ap.runtime.hangs.process_looks import processor_s_of_children

_STILL_S = 1.0
_DEPTH = 4  # frames of the code that calls a collective, between it and the function that waits
_COLLECTIVES = "/torch/distributed/"
_OURS = ("/torch/", "/moreh_ap/")
_EXECUTES = "/moreh_ap/runtime/worker/"


class Said(NamedTuple):
    """What a worker says.

    Attributes:
        stacks: Of all its threads; empty where it says nothing.
        waits_in: The collective in which the thread waits that executes commands; empty if it does something else.
        is_still: Whether what it has started, such as a compiler, computes nothing either.
    """

    stacks: str = ""
    waits_in: str = ""
    is_still: bool = False


def ask(pids: Mapping[int, int]) -> dict[int, Said]:
    """Returns what workers of this machine say; takes 1 to 4 s. Those that are stopped go on.

    Args:
        pids: Their processes, by whatever the answer is to be found under.
    """
    before_s = {key: processor_s_of_children(pid) for key, pid in pids.items()}
    stacks = stack_dumps.read(pids)
    time.sleep(_STILL_S)
    return {
        key: Said(stacks[key], collective_of(stacks[key]), processor_s_of_children(pid) == before_s[key])
        for key, pid in pids.items()
    }


def collective_of(stacks: str) -> str:
    """Returns the collective in which the thread waits that executes commands; empty if it does something else."""
    for frames in stack_dumps.threads_of(stacks):
        if not any(_EXECUTES in frame.file for frame in frames) or not any(one.function == "serve" for one in frames):
            continue
        innermost = frames[0]
        if any(part in innermost.file for part in _OURS):
            if ".wait(" in linecache.getline(innermost.file, innermost.line):
                return innermost.function
            return next((frame.function for frame in frames[:_DEPTH] if _COLLECTIVES in frame.file), "")
    return ""
