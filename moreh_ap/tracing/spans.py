"""Spans of time in one process, and functions that are timed while a trace is recorded.

Decides which clock is read and on which lane of its process a span lies. Must not know what is timed, nor how spans are
written.

[Note: clocks]
Spans are in nanoseconds of `time.perf_counter_ns`, which on Linux all processes of a machine share. A process also says
how far its wall clock is ahead of that. Between processes of one machine the difference is not used, so that a wall
clock that is set meanwhile moves nothing; processes of different machines meet on the wall clock, as exactly as these
machines keep it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

now_ns = time.perf_counter_ns

SCRIPT = "script"
"""The lane of the main thread."""


class Span(NamedTuple):
    """An activity of a process, with its beginning and its duration.

    Attributes:
        name: What it did, in words of a user.
        category: "call", "backward", "optimizer", "data", "message", "command", "collective", "device" or "wait".
        began_ns: When it began, on this process's clock.
        ended_ns: When it ended.
        lane: The thread, or another row of the process. Spans of a lane are nested or apart.
        details: What else is known, by name. Spans with the same number in "message" are of one message.
    """

    name: str
    category: str
    began_ns: int
    ended_ns: int
    lane: str
    details: dict[str, Any]

    def on(self, lane: str) -> Span:
        """Returns the span on another lane."""
        return Span(self.name, self.category, self.began_ns, self.ended_ns, lane, self.details)


class Clock(NamedTuple):
    """The clock of a process's spans. See [Note: clocks].

    Attributes:
        machine: Equal for processes that share a clock.
        wall_ahead_ns: What has to be added to a time for the wall clock, in nanoseconds since 1970.
    """

    machine: str
    wall_ahead_ns: int


def this_clock() -> Clock:
    """Returns the clock of this process."""
    try:
        machine = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:  # not Linux: the workers are on this machine
        machine = ""
    return Clock(machine, time.time_ns() - now_ns())


class Recorder:
    """Collects the spans of one process; any thread may add some.

    Attributes:
        spans: Those that have ended, in the order of their ends.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, name: str, category: str, began_ns: int, ended_ns: int, **details: Any) -> None:
        """Adds a span on the lane of this thread."""
        self.spans.append(Span(name, category, began_ns, ended_ns, _lane(), details))

    @contextlib.contextmanager
    def span(self, name: str, category: str, **details: Any) -> Iterator[dict[str, Any]]:
        """Times what is inside, also if it raises; yields the details, to which it may add."""
        began_ns = now_ns()
        try:
            yield details
        finally:
            self.spans.append(Span(name, category, began_ns, now_ns(), _lane(), details))

    def timed(self, function: Callable[..., Any], name: str, category: str) -> Callable[..., Any]:
        """Returns `function` with a span around each call."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.span(name, category):
                return function(*args, **kwargs)

        return run


def _lane() -> str:
    thread = threading.current_thread()
    return SCRIPT if thread is threading.main_thread() else f"{thread.name} ({thread.ident})"


def within(spans: Iterable[Span], began_ns: int, ended_ns: int) -> list[Span]:
    """Returns what of `spans` lies between two times; a span that reaches beyond is cut there."""
    return [
        Span(name, category, max(start_ns, began_ns), min(end_ns, ended_ns), lane, details)
        for name, category, start_ns, end_ns, lane, details in spans
        if end_ns > began_ns and start_ns < ended_ns
    ]


def on_lanes(spans: list[Span], name: str) -> list[Span]:
    """Returns spans that may overlap in any way, each on the first of the lanes "name", "name 2", ... that is free."""
    free_from: list[int] = []
    placed = []
    for span in sorted(spans, key=lambda span: span.began_ns):
        lane = next((index for index, end in enumerate(free_from) if end <= span.began_ns), len(free_from))
        free_from[lane : lane + 1] = [span.ended_ns]
        placed.append(span.on(name if lane == 0 else f"{name} {lane + 1}"))
    return placed
