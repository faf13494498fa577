"""A trace of steps: workers record what they do, and send it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moreh_ap.tracing.spans import Clock, Span


@dataclass(frozen=True)
class BeginTrace:
    """Record from now on."""


@dataclass(frozen=True)
class EndTrace:
    """Stop recording; answer a `WorkerTrace`."""


@dataclass(frozen=True)
class WorkerTrace:
    """The spans that one worker recorded.

    Attributes:
        pid: Its process id.
        clock: The clock of the spans.
        spans: What it did; empty if it did not record.
    """

    pid: int
    clock: Clock
    spans: tuple[Span, ...]


def words(command: type) -> str:
    """Returns the name of a class of commands in words.

    Example:
        >>> words(BeginTrace)
        'begin trace'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", command.__name__).lower()
