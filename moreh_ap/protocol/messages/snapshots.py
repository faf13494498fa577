"""Copies of what workers hold, in memory that outlives them.

Where the slots of a worker's host are, its `WorkerSpec` says: a command is the same for all hosts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from moreh_ap.protocol.messages.memory_files import MemoryFile

STILL_OPEN = "a backward may still go through a call"
"""Why there is no copy at the moment: autograd graphs cannot be copied."""

TOO_LARGE = "too large"
"""Why there is none: it has more bytes than it may have."""


TOO_LONG = "it would take longer than it may"
"""Why there is none: `Snapshot.seconds` is what it would take."""


@dataclass(frozen=True)
class TakeSnapshot:
    """Copy everything that later commands can name into this worker's part of a slot. Answers a `Snapshot`.

    No worker waits for another, but on several hosts, where the copy goes to the next one, too. What was there before
    is lost, even where there is a problem.

    slot: Which of the host's slots, or a file that all workers can open, where they are on one machine.
    number: By which the copy is known.
    most_bytes: It may have.
    most_s: Seconds that it may take.
    after_error: A command has just ended in an error on all workers: tell what of it is done, and what made the models.
        Nothing goes to the next host.
    is_alone: It has ended so on this worker; others write no copy, so this one has to have all of every tensor.
    """

    slot: int | MemoryFile
    number: int
    most_bytes: int
    most_s: float = math.inf
    after_error: bool = False
    is_alone: bool = False


class Failed(NamedTuple):
    """A worker's answer about the command that ended in an error.

    Attributes:
        num_done: How many commands of its message were executed before it.
        half_made: What it has left half made; empty if it has changed nothing.
        structure: The commands that made what copies do not have.
    """

    num_done: int
    half_made: str
    structure: tuple[Any, ...]


class Snapshot(NamedTuple):
    """How a worker's copy went.

    Attributes:
        problem: Why there is none; empty if there is one.
        num_bytes: Its size.
        seconds: What it took.
        since_s: Seconds since the worker was asked for one before; 0 if it never was.
        bound: Why workers under another plan cannot take it over; empty if they can.
        failed: Of the last error, if that was asked for.
    """

    problem: str
    num_bytes: int = 0
    seconds: float = 0.0
    since_s: float = 0.0
    bound: str = ""
    failed: Failed | None = None


@dataclass(frozen=True)
class RestoreSnapshot:
    """Hold what a copy has. Models and optimizers are there already, made by the commands that made them before.

    of_workers: Under another plan, or on another number of workers: how many wrote copies, of which each takes what it
    holds now. None: each takes its own.
    first: Under another plan: the rank of the first of those.
    """

    slot: int | MemoryFile
    number: int
    of_workers: int | None = None
    first: int = 0
