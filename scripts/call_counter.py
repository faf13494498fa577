"""Counts Python calls of the package's functions, in any thread that has the counter as its profile function.

Decides which calls count. Must not know what runs meanwhile. Which functions a thread calls while it looks for an
answer that is not there depends on when the answer arrives: what `LOOKING`, `TURNS` and `LONG_WAITS` name is left out.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Function = tuple[str, str]
"""A module and the qualified name of a function in it."""

LOOKING = {
    ("moreh_ap.runtime.receiver", "Receiver.look_around"),
    ("moreh_ap.runtime.receiver", "Receiver._find_failure"),
    ("moreh_ap.runtime.worker_output", "WorkerOutput._run"),
}
"""How often threads look whether the workers are well, and what they have printed, with what that calls."""

TURNS = {
    ("moreh_ap.runtime.engine", "Pending.wait"),
    ("moreh_ap.runtime.relay.frames", "Arriving.take"),
    ("moreh_ap.runtime.relay.worker_links", "LinkedAnswers.wait"),
    ("moreh_ap.runtime.relay.worker_links", "WorkerLinks.read_for"),
    ("moreh_ap.runtime.worker_group", "WorkerGroup._receive_next"),
    ("moreh_ap.runtime.worker_group", "WorkerGroup.is_stopped"),
}
"""How often it goes round, and in how many pieces an answer arrives; what these call for one that is there counts."""

LONG_WAITS = {
    ("moreh_ap.local.interrupts", "wait_in_turns"),
    ("moreh_ap.local.interrupts", "_between_turns"),
    ("moreh_ap.runtime.worker_group", "WorkerGroup._wait.<locals>.<lambda>"),
}
"""How often a wait goes on that is not over in its first turn, in any thread."""


class CallCounter:
    """Counts calls of the package's functions in the threads that it was given to as their profile function."""

    def __init__(self) -> None:
        self._is_counting = False
        self._called: list[Function] = []  # appending to it is atomic, adding to a number is not

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and self._is_counting:
            function = _function_of(frame)
            if function[0].startswith("moreh_ap.") and not _depends_on_time(frame, function):
                self._called.append(function)

    def begin(self) -> None:
        """Counts from now on, in the calling thread too."""
        self._called = []
        sys.setprofile(self)
        self._is_counting = True

    def end(self) -> collections.Counter[Function]:
        """Returns the calls since `begin`, by function."""
        self._is_counting = False
        sys.setprofile(None)
        return collections.Counter(self._called)

    def count(self, step: Callable[[], object]) -> collections.Counter[Function]:
        """Returns the calls during a step, by function."""
        self.begin()
        try:
            step()
        finally:
            calls = self.end()
        return calls


def _function_of(frame: FrameType) -> Function:
    # Generated functions have no file, but their module's globals.
    return frame.f_globals.get("__name__", ""), frame.f_code.co_qualname


def _depends_on_time(frame: FrameType, function: Function) -> bool:
    if function in LONG_WAITS:
        return True
    if threading.current_thread() is threading.main_thread():
        return False
    if function in TURNS:
        return True
    caller: FrameType | None = frame
    while caller is not None:
        if _function_of(caller) in LOOKING:
            return True
        caller = caller.f_back
    return False
