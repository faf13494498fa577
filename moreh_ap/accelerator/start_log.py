"""The lines of the log that say how far the start of workers is.

Decides their wording, which is the platform's. Must not know how workers start, nor the planner, which takes a while to
import.
"""

from __future__ import annotations

import os

from moreh_ap.local import logger
from moreh_ap.version import __version__


def requesting_line() -> str:
    """Returns the first line of all, before anything is started."""
    return "Requesting resources for MoAI Accelerator..."


def daemon_line() -> str:
    """Returns the line for the start of the worker processes."""
    return "Initializing the worker daemon for MoAI Accelerator"


def connecting_line(index: int, total: int, address: str) -> str:
    """Returns the line for worker `index` of `total`, counted from 1; `address` is `host:port`."""
    return f"[{index}/{total}] Connecting to resources on the server ({address})..."


def links_line() -> str:
    """Returns the line for joining the process groups."""
    return "Establishing links to the resources..."


def ready_line() -> str:
    """Returns the line that says the accelerator can be used."""
    return "MoAI Accelerator is ready to use."


def version_line(version: str) -> str:
    """Returns the line that names our version."""
    return f"Moreh Version: {version}"


def job_line(job_id: int | str) -> str:
    """Returns the line that names the job."""
    return f"Moreh Job ID: {job_id}"


def say_progress(stage: str, done: int, total: int, place: str) -> None:
    """Says how far the start of workers is.

    Args:
        stage: One of the stages of `WorkerGroup`.
        done, total: Workers that are connected, and all.
        place: Where the last of them is.
    """
    if stage == "spawn":
        logger.say(daemon_line())
    elif stage == "connect":
        logger.say(connecting_line(done, total, place))
    elif stage == "link":
        logger.say(links_line())
    elif stage == "ready":
        logger.say(ready_line())
        logger.say(version_line(__version__))
        logger.say(job_line(os.getpid()))
