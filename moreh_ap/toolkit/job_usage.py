"""The jobs that run at this moment: their accelerators, and the memory and time that each worker uses.

Decides how memory and utilization are read from living processes. Must not know how they are shown, nor how a job is
ended. Utilization needs two looks, some time apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from moreh_ap import accelerator_models
from moreh_ap.local.jobs import JobEntry, Process, RemoteWorker, running_jobs
from moreh_ap.toolkit.machine_inventory import Gpu, MachineInventory, look

SAMPLE_S = 0.3
"""Seconds between the two looks: 30 ticks of the clock by which the system counts CPU time."""


@dataclass(frozen=True)
class WorkerState:
    """One worker and its device.

    Attributes:
        rank: Its number in the job.
        pid: Its process.
        device: Key of its device: the number of the GPU, or the process of a CPU worker.
        name: Name of the device.
        used_bytes: Memory in use, of its process, or of its GPU; None if it cannot be read.
        total_bytes: Memory of the device; of a CPU worker, its part of the machine's.
        busy: How many devices, or cores, it kept busy; None if it cannot be read.
        share: How many devices, or cores, it may use.
        gpu: Readings of its GPU.
        host: The machine on which it is; empty: this one.
    """

    rank: int
    pid: int
    device: str
    name: str
    used_bytes: int | None
    total_bytes: int
    busy: float | None
    share: float
    gpu: Gpu | None = None
    host: str = ""

    @property
    def utilization(self) -> float | None:
        """Per cent of what it may use."""
        return None if self.busy is None else min(100.0, 100.0 * self.busy / self.share)


@dataclass(frozen=True)
class JobState:
    """A job and its workers; none while they start, or once they are lost."""

    entry: JobEntry
    command: str
    workers: tuple[WorkerState, ...]

    @property
    def used_bytes(self) -> int | None:
        """Memory of all its devices."""
        return used_bytes(self.workers)


@dataclass(frozen=True)
class Snapshot:
    """Everything that can be shown.

    Attributes:
        machine: What the machine has.
        accelerators: What was set up.
        jobs: What runs, oldest first.
    """

    machine: MachineInventory
    accelerators: accelerator_models.Accelerators
    jobs: tuple[JobState, ...]

    def workers_on(self, accelerator: int) -> list[WorkerState]:
        """Returns the workers of all jobs that took this accelerator."""
        return [worker for job in self.jobs if job.entry.accelerator == accelerator for worker in job.workers]

    def total_bytes(self, workers: Sequence[WorkerState]) -> int:
        """Returns the memory of these workers' devices, each counted once, and never more than there is."""
        here, elsewhere = _here_and_elsewhere(workers)
        found = sum({worker.device: worker.total_bytes for worker in here}.values())
        of_hosts = sum(worker.total_bytes for worker in elsewhere)
        return of_hosts + (found if self.machine.gpus else min(found, self.machine.supply.memory_bytes))

    def utilization(self, workers: Sequence[WorkerState]) -> float | None:
        """Returns per cent of the devices, or cores, that these workers may use together."""
        if any(worker.busy is None for worker in workers) or not workers:
            return None
        here, elsewhere = _here_and_elsewhere(workers)
        share = min(float(self.machine.supply.num_devices), sum(worker.share for worker in here))
        share += sum(worker.share for worker in elsewhere)
        return min(100.0, 100.0 * sum(worker.busy or 0.0 for worker in workers) / share)


def _here_and_elsewhere(workers: Sequence[WorkerState]) -> tuple[list[WorkerState], list[WorkerState]]:
    """Returns workers of this machine and those of others, of which every one has devices of its own."""
    return [one for one in workers if not one.host], [one for one in workers if one.host]


def used_bytes(workers: Sequence[WorkerState]) -> int | None:
    """Returns the memory of these workers' devices, each counted once; None if there are none or it is unknown."""
    found = {worker.device: worker.used_bytes for worker in workers if worker.used_bytes is not None}
    return sum(found.values()) if found else None


def snapshot(sample_s: float = SAMPLE_S) -> Snapshot:
    """Returns what runs now; takes `sample_s` seconds if anything does.

    Args:
        sample_s: Seconds over which CPU workers' utilization is taken.
    """
    entries = running_jobs()
    before, started_s = _cpu_seconds(entries), time.monotonic()
    if entries:
        time.sleep(sample_s)
        entries = [entry for entry in entries if entry.is_alive()]
    after, passed_s = _cpu_seconds(entries), max(time.monotonic() - started_s, 1e-3)
    cores = {process: (after[process] - before[process]) / passed_s for process in after.keys() & before.keys()}
    machine = look()
    jobs = tuple(JobState(entry, command_of(entry), _workers(entry, machine, cores)) for entry in entries)
    return Snapshot(machine, accelerator_models.load(machine.supply.device_type), jobs)


def _workers(entry: JobEntry, machine: MachineInventory, cores: dict[Process, float]) -> tuple[WorkerState, ...]:
    ids = entry.device_ids or tuple(str(rank) for rank in range(entry.devices))
    gpus = machine.gpus if entry.device_type == "cuda" else ()
    found = []
    for rank, process in enumerate(entry.workers):
        if not process.is_alive():
            continue
        gpu = next((gpu for gpu in gpus if gpu.is_called(ids[rank])), None)
        if gpu is not None:
            busy = None if gpu.utilization is None else gpu.utilization / 100
            found.append(
                WorkerState(
                    rank, process.pid, f"gpu {gpu.index}", gpu.name, gpu.used_bytes, gpu.total_bytes, busy, 1.0, gpu
                )
            )
            continue
        share = min(float(entry.threads_per_worker), machine.supply.num_devices / entry.devices)
        total = machine.supply.memory_bytes // entry.devices
        name = f"CPU worker, {share:g} core{'s' if share != 1 else ''}"
        found.append(
            WorkerState(
                rank, process.pid, f"process {process.pid}", name, _memory(process), total, cores.get(process), share
            )
        )
    return (*found, *map(_elsewhere, entry.remote_workers))


def _elsewhere(worker: RemoteWorker) -> WorkerState:
    """Returns the state of a worker on another host, as its agent has said it."""
    cores = f"CPU worker, {worker.share:g} core{'s' if worker.share != 1 else ''}"
    return WorkerState(
        worker.rank, worker.pid, f"process {worker.pid} of {worker.host}", cores if worker.total_bytes else "GPU",
        worker.used_bytes, worker.total_bytes, worker.busy, worker.share, host=worker.host,
    )  # fmt: skip


def _cpu_seconds(entries: Sequence[JobEntry]) -> dict[Process, float]:
    """Returns the CPU time of every worker that can be read."""
    found = {}
    for process in (worker for entry in entries for worker in entry.workers):
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(process.pid).cpu_times()
            found[process] = times.user + times.system
    return found


def _memory(process: Process) -> int | None:
    """Returns a process's memory, what it shares with others divided by their number (PSS), or all of it (RSS)."""
    try:
        running = psutil.Process(process.pid)
        try:
            return int(running.memory_full_info().pss)
        except psutil.AccessDenied:
            return int(running.memory_info().rss)
    except psutil.Error:
        return None


def command_of(entry: JobEntry) -> str:
    """Returns the command line of a job, without the folder of its program; says so if the process is gone."""
    try:
        words = psutil.Process(entry.process.pid).cmdline()
    except psutil.Error:
        words = []
    if not words or not entry.process.is_alive():
        return "(ended; its workers are left)"
    return " ".join([words[0].rpartition("/")[2], *words[1:]])
