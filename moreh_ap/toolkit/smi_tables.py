"""The tables of `moreh-smi`, made of a snapshot.

Decides columns and wording. Must not know where the figures come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from moreh_ap import accelerator_models
from moreh_ap.accelerator_models import Accelerators
from moreh_ap.toolkit.fitting_table import FittingTable
from moreh_ap.toolkit.job_usage import JobState, Snapshot, used_bytes
from moreh_ap.version import __version__

NAME = "MoAI Accelerator"
_LEAST_WIDTH = 160
_IDLE = "-"


def console() -> Console:
    """Returns where tables go: the terminal, or a file or pipe, where lines may be as long as they are there."""
    terminal = Console(highlight=False, markup=False, emoji=False)
    if not terminal.is_terminal:
        terminal.width = max(_LEAST_WIDTH, terminal.width)
    return terminal


def overview(snapshot: Snapshot, only: int | None = None) -> RenderableType:
    """Returns the table of accelerators and, if a job runs, that of processes.

    Args:
        snapshot: What runs.
        only: Number of the one accelerator to show.
    """
    table = FittingTable(
        "Device", "Name", "Model", "Memory Usage", "Total Memory", "Utilization",
        title=f"Current Version: {__version__}",
    )  # fmt: skip
    for number, model in snapshot.accelerators.models.items():
        if only in (None, number):
            workers = snapshot.workers_on(number)
            table.add_row(
                marked(snapshot.accelerators, number), NAME, model or _model_of_all(snapshot),
                _mib(used_bytes(workers)), _mib(snapshot.total_bytes(workers) if workers else None),
                _percent(snapshot.utilization(workers)),
            )  # fmt: skip
    jobs = list(_jobs(snapshot, only))
    return _with_jobs(table, "Processes:", _processes(jobs)) if jobs else table


def physical(snapshot: Snapshot, only: int | None = None) -> RenderableType:
    """Returns a row for each physical device behind the accelerators, and what each job trains under which plan."""
    jobs = list(_jobs(snapshot, only))
    host = ("Host",) if any(worker.host for job in jobs for worker in job.workers) else ()
    table = FittingTable(
        "Device", "Rank", *host, "Name", "Job ID", "PID", "Memory Usage", "Total Memory", "Utilization",
        *(("Temperature", "Power") if snapshot.machine.gpus else ()),
        title=f"{snapshot.machine.processor}, {snapshot.machine.supply}",
    )  # fmt: skip
    for job in jobs:
        for worker in job.workers:
            where = (worker.host or "this one",) if host else ()
            table.add_row(str(job.entry.accelerator), str(worker.rank), *where, worker.name, job.entry.job_id,
                          str(worker.pid), _mib(worker.used_bytes), _mib(worker.total_bytes or None),
                          _percent(worker.utilization), *_hardware(worker.gpu))  # fmt: skip
    held = {worker.device for job in snapshot.jobs for worker in job.workers}
    for gpu in snapshot.machine.gpus:
        if f"gpu {gpu.index}" not in held:
            table.add_row(_IDLE, _IDLE, *(_IDLE for _ in host), gpu.name, _IDLE, _IDLE, _mib(gpu.used_bytes),
                          _mib(gpu.total_bytes), _percent(gpu.utilization), *_hardware(gpu))  # fmt: skip
    if not snapshot.machine.gpus and not any(job.workers for job in jobs):
        cores = snapshot.machine.supply.num_devices
        table.add_row(_IDLE, _IDLE, f"no CPU worker; {cores} core{'s' if cores > 1 else ''}", *[_IDLE] * 5)
    return _with_jobs(table, "Jobs:", _details(jobs)) if jobs else table


def listed(accelerators: Accelerators, model_of_all: str) -> FittingTable:
    """Returns the table that `moreh-smi device` prints after a change."""
    table = FittingTable("Device", "Name", "Model")
    for number, model in accelerators.models.items():
        table.add_row(marked(accelerators, number), NAME, model or model_of_all)
    return table


def marked(accelerators: Accelerators, number: int) -> str:
    """Returns the number of an accelerator, with a star if the next process takes it."""
    return f"{'*' if number == accelerators.current else ' '} {number}"


def plain(snapshot: Snapshot, only: int | None = None) -> dict[str, Any]:
    """Returns everything as JSON can say it."""
    return {
        "version": __version__,
        "device_type": snapshot.machine.supply.device_type,
        "accelerators": [
            {
                "device": number,
                "current": number == snapshot.accelerators.current,
                "name": NAME,
                "model": model or _model_of_all(snapshot),
                "used_bytes": used_bytes(snapshot.workers_on(number)),
                "total_bytes": snapshot.total_bytes(snapshot.workers_on(number)) or None,
                "utilization_percent": snapshot.utilization(snapshot.workers_on(number)),
            }
            for number, model in snapshot.accelerators.models.items()
            if only in (None, number)
        ],
        "jobs": [_plain_job(job) for job in _jobs(snapshot, only)],
    }


def _plain_job(job: JobState) -> dict[str, Any]:
    entry = job.entry
    return {
        "device": entry.accelerator,
        "job_id": entry.job_id,
        "pid": entry.process.pid,
        "process": job.command,
        "started_at": entry.started_at,
        "devices": entry.devices,
        "model": entry.model,
        "plan": entry.plan,
        "losses_survived": entry.losses_survived,
        "used_bytes": job.used_bytes,
        "workers": [
            {
                "rank": worker.rank,
                "pid": worker.pid,
                "host": worker.host or None,
                "name": worker.name,
                "used_bytes": worker.used_bytes,
                "total_bytes": worker.total_bytes,
                "utilization_percent": worker.utilization,
            }
            for worker in job.workers
        ],
    }


def _jobs(snapshot: Snapshot, only: int | None) -> Iterator[JobState]:
    return (job for job in snapshot.jobs if only in (None, job.entry.accelerator))


def _with_jobs(table: FittingTable, title: str, jobs: FittingTable) -> Group:
    return Group(table, Text(), Text(title), jobs)


def _processes(jobs: list[JobState]) -> FittingTable:
    table = FittingTable("Device", "Job ID", "PID", "Process", "Memory Usage")
    for job in jobs:
        entry = job.entry
        table.add_row(str(entry.accelerator), entry.job_id, str(entry.process.pid), job.command, _mib(job.used_bytes))
    return table


def _details(jobs: list[JobState]) -> FittingTable:
    lost = ("Losses Survived",) if any(job.entry.losses_survived for job in jobs) else ()
    table = FittingTable("Job ID", "Devices", "Model", "Plan", "Started", *lost, "Process")
    for job in jobs:
        entry = job.entry
        survived = (str(entry.losses_survived),) if lost else ()
        table.add_row(entry.job_id, str(entry.devices), entry.model or _IDLE, entry.plan or _IDLE,
                      entry.started_at.replace("T", " ")[:19], *survived, job.command)  # fmt: skip
    return table


def _hardware(gpu: Any) -> tuple[str, ...]:
    if gpu is None:
        return ()
    temperature = _IDLE if gpu.temperature is None else f"{gpu.temperature:.0f} C"
    return temperature, _IDLE if gpu.power_w is None else f"{gpu.power_w:.0f} W"


def _model_of_all(snapshot: Snapshot) -> str:
    return accelerator_models.model_of_all(snapshot.machine.supply)


def _mib(num_bytes: int | None) -> str:
    return _IDLE if num_bytes is None else f"{num_bytes / 2**20:.0f} MiB"


def _percent(value: float | None) -> str:
    return _IDLE if value is None else f"{value:.0f} %"
