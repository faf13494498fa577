"""`moreh-smi --reset`: ends jobs that do not end by themselves.

Decides which processes belong to a job and how they are ended: asked first, then killed. Must not know why a job is
stuck. Only processes of this user are touched, and only those that the job's entry names and their children; each is
compared with the start time in the entry, so that a later process with the same id is safe.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import psutil

from moreh_ap.local.jobs import JobEntry, running_jobs
from moreh_ap.toolkit import prompts
from moreh_ap.toolkit.job_usage import command_of

ASKED_S = 5.0
"""Seconds that a process has to end in an orderly way."""


def run(only: int | None, yes: bool) -> int:
    """Ends the jobs after asking and returns the exit status: 0 if none is left that was to be ended.

    Args:
        only: Number of the one accelerator whose jobs are meant.
        yes: Do not ask.

    Raises:
        EOFError: An answer is needed, and standard input is closed or at its end.
    """
    jobs = [job for job in running_jobs() if only in (None, job.accelerator)]
    own = [job for job in jobs if _is_own(job)]
    for job in jobs:
        if job not in own:
            print(f"Job {job.job_id} is another user's and stays.")
    if not own:
        print("There is no job to end.")
        return 0
    for job in own:
        print(f"Job {job.job_id}: {command_of(job)}")
    if not yes and not prompts.agree(f"End {'this job' if len(own) == 1 else f'these {len(own)} jobs'}?"):
        print("Nothing was ended.")
        return 1
    left = end(own)
    for job in own:
        print(f"Job {job.job_id} {'could not be ended' if job in left else 'was ended'}.")
    running_jobs()  # deletes their entries
    return 1 if left else 0


def end(jobs: Sequence[JobEntry], asked_s: float = ASKED_S) -> list[JobEntry]:
    """Ends all processes of these jobs and returns the jobs of which some are left.

    Args:
        jobs: The jobs.
        asked_s: Seconds that they have before they are killed.
    """
    controllers, others = [], []
    for job in jobs:
        controllers += _family(job.process.pid) if job.process.is_alive() else []
        for worker in job.workers:
            others += _family(worker.pid) if worker.is_alive() else []
    for process in controllers[:]:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    # Workers die with their controller; whatever has not by then is beyond asking.
    _, alive = psutil.wait_procs({*controllers, *others}, timeout=asked_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=asked_s)
    return [job for job in jobs if job.is_alive()]


def _family(pid: int) -> list[psutil.Process]:
    """Returns a process and all that it started."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _is_own(job: JobEntry) -> bool:
    """Returns whether all processes of a job that still run are this user's."""
    living = [process.pid for process in (job.process, *job.workers) if process.is_alive()]
    with contextlib.suppress(psutil.Error):
        return all(psutil.Process(pid).uids().real == os.getuid() for pid in living)
    return False
