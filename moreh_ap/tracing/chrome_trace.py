"""The file of a trace: JSON in Chrome's trace event format, which Perfetto and chrome://tracing show.

Decides how processes, lanes, spans and messages are written, and how the clocks of processes become one time axis. Must
not know how spans are recorded.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moreh_ap.errors import OptionError
from moreh_ap.tracing.spans import SCRIPT, Clock, Span, within

LINK = "docs/trace.md"
STEPS = "steps"
"""The lane of the steps."""


class ProcessTrace(NamedTuple):
    """The events that one process recorded.

    Attributes:
        name: "controller" or "worker 0".
        pid: Its process id.
        clock: The clock of its spans.
        spans: What it did.
    """

    name: str
    pid: int
    clock: Clock
    spans: Sequence[Span]


def claim(file: Path) -> None:
    """Makes `file` a trace without events, so that a file that cannot be written is known before the training.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        file.write_text(json.dumps({"traceEvents": []}) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"MOREH_TRACE={str(file)!r} cannot be written: {error.strerror}",
            "a file in a folder that exists and can be written to",
            "MOREH_TRACE=trace.json python train.py",
            LINK,
        ) from error


def cut(process: ProcessTrace, reference: Clock, began_ns: int, ended_ns: int) -> ProcessTrace:
    """Returns what of a process lies between two times of the clock `reference`."""
    shift_ns = _shift_ns(process.clock, reference)
    spans = within(process.spans, began_ns - shift_ns, ended_ns - shift_ns)
    return ProcessTrace(process.name, process.pid, process.clock, spans)


def write(file: Path, processes: Sequence[ProcessTrace], notes: Mapping[str, Any]) -> None:
    """Writes the trace at once: whoever reads the file meanwhile, or after an interruption, finds a whole one.

    Args:
        file: Where to.
        processes: The controller, then the workers in rank order.
        notes: What is known of the run.

    Raises:
        OSError: It cannot be written.
    """
    document = {"traceEvents": list(events(processes)), "displayTimeUnit": "ms", "otherData": dict(notes)}
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(document) + "\n", encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def events(processes: Sequence[ProcessTrace]) -> Iterator[dict[str, Any]]:
    """Yields the events of the file; the first span begins at 0. Times are in microseconds, as the format wants."""
    shifts_ns = [_shift_ns(process.clock, processes[0].clock) for process in processes]
    starts = [span.began_ns + shift for process, shift in zip(processes, shifts_ns) for span in process.spans]
    first_ns = min(starts, default=0)
    for number, (process, shift_ns) in enumerate(zip(processes, shifts_ns)):
        yield from _names(number, process)
        lanes = _lanes(process.spans)
        for span in sorted(process.spans, key=lambda span: (span.began_ns, -span.ended_ns)):
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "pid": number,
                "tid": lanes[span.lane],
                "ts": (span.began_ns + shift_ns - first_ns) / 1000,
                "dur": (span.ended_ns - span.began_ns) / 1000,
                "args": span.details,
            }
    yield from _arrows(processes, [shift_ns - first_ns for shift_ns in shifts_ns])


def _shift_ns(clock: Clock, reference: Clock) -> int:
    """Returns what is added to a time of `clock` for the time of `reference`. See [Note: clocks] in `spans.py`."""
    return 0 if clock.machine == reference.machine else clock.wall_ahead_ns - reference.wall_ahead_ns


def _lanes(spans: Iterable[Span]) -> dict[str, int]:
    """Returns a number for each lane, in alphabetical order; steps and the script's thread come first."""
    names = sorted({span.lane for span in spans}, key=lambda name: (name != STEPS, name != SCRIPT, name))
    return {name: number for number, name in enumerate(names)}


def _names(number: int, process: ProcessTrace) -> Iterator[dict[str, Any]]:
    def named(kind: str, lane: int, **args: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": number, "tid": lane, "args": args}

    yield named("process_name", 0, name=process.name)
    yield named("process_labels", 0, labels=f"process {process.pid}")
    yield named("process_sort_index", 0, sort_index=number)
    for lane, index in _lanes(process.spans).items():
        yield named("thread_name", index, name=lane)
        yield named("thread_sort_index", index, sort_index=index)


def _arrows(processes: Sequence[ProcessTrace], shifts_ns: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields an arrow for each message, from where the controller sends it to where a worker begins with it."""
    if not processes:
        return
    lanes = [_lanes(process.spans) for process in processes]
    sent = {span.details["message"]: span for span in processes[0].spans if "message" in span.details}
    for number, process in enumerate(processes[1:], start=1):
        for span in process.spans:
            source = sent.get(span.details.get("message"))
            if source is None:
                continue
            both: dict[str, Any] = {
                "name": "message",
                "cat": "message",
                "id": span.details["message"] * len(processes) + number,
            }
            source_us = (source.began_ns + shifts_ns[0]) / 1000
            arrival_us = (span.began_ns + shifts_ns[number]) / 1000
            yield {"ph": "s", **both, "pid": 0, "tid": lanes[0][source.lane], "ts": source_us}
            yield {"ph": "f", "bp": "e", **both, "pid": number, "tid": lanes[number][span.lane], "ts": arrival_us}
