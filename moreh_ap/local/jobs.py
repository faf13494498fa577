"""Which processes of this machine hold devices: one small file a process, for other programs to read.

Decides the content of such a file and when it no longer counts. Must not know how it is shown, nor who ends a job.
A file may be read by people. One whose processes are gone counts as absent, and the next reader deletes it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from moreh_ap.local.cache_files import cache_folder, write_whole


@dataclass(frozen=True)
class Process:
    """One process of one boot of this machine; a later process with the same id is another.

    Attributes:
        pid: Its id.
        started: When it started, as `start_of` says it.
    """

    pid: int
    started: str

    def is_alive(self) -> bool:
        """Returns whether it still runs; a zombie, which has ended but was not waited for, does not."""
        return self.started == start_of(self.pid)


@dataclass(frozen=True)
class RemoteWorker:
    """A worker on another host, as its agent has said last.

    Attributes:
        rank: Its number in the job.
        host: The host, as a log may name it.
        pid: Its process there.
        used_bytes: Memory of its process; None for a GPU, which the agent does not read.
        total_bytes: Its part of the host's memory; 0 for a GPU.
        busy: How many cores it kept busy; None if not known.
        share: How many cores, or GPUs, it may use.
    """

    rank: int
    host: str
    pid: int
    used_bytes: int | None
    total_bytes: int
    busy: float | None
    share: float


@dataclass(frozen=True)
class JobEntry:
    """One process and the devices it has taken.

    Attributes:
        job_id: As in the log of the process.
        process: The process itself, the controller.
        started_at: Local time at which it took the devices, ISO 8601.
        accelerator: Number of the accelerator of which it has taken them.
        accelerator_model: Model of that accelerator at that time.
        device_type: "cuda" or "cpu".
        devices: Number of devices.
        threads_per_worker: CPU threads of each worker.
        workers: Worker processes in rank order; none while they are starting.
        model: Class of the model, empty before its first call.
        plan: Its plan, as text.
        device_ids: Which GPU each worker has, as CUDA_VISIBLE_DEVICES names it; none for CPU workers.
        remote_workers: Workers on other hosts, which are no processes of this machine.
        losses_survived: How often others have taken over from lost workers.
    """

    job_id: str
    process: Process
    started_at: str
    accelerator: int
    accelerator_model: str
    device_type: str
    devices: int
    threads_per_worker: int
    workers: tuple[Process, ...] = ()
    model: str = ""
    plan: str = ""
    device_ids: tuple[str, ...] = ()
    remote_workers: tuple[RemoteWorker, ...] = ()
    losses_survived: int = 0

    def is_alive(self) -> bool:
        """Returns whether any of its processes still runs."""
        return any(process.is_alive() for process in (self.process, *self.workers))


class Job:
    """This process's entry, from when it takes devices until it gives them back.

    Where the folder cannot be written, the job runs all the same and is not listed.

    Args:
        accelerator: Number of the accelerator.
        accelerator_model: Its model.
        device_type: "cuda" or "cpu".
        devices: Number of devices.
        threads_per_worker: CPU threads of each worker.
        device_ids: See `JobEntry`.

    Attributes:
        losses_survived: See `JobEntry`.
    """

    def __init__(
        self,
        accelerator: int,
        accelerator_model: str,
        device_type: str,
        devices: int,
        threads_per_worker: int,
        device_ids: tuple[str, ...] = (),
    ) -> None:
        pid = os.getpid()
        self._lock = threading.Lock()
        self.losses_survived = 0
        self._path = folder() / f"{platform.node()}-{pid}.json"
        self._entry: JobEntry | None = JobEntry(
            job_id=str(pid),
            process=Process(pid, start_of(pid)),
            started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
            accelerator=accelerator,
            accelerator_model=accelerator_model,
            device_type=device_type,
            devices=devices,
            threads_per_worker=threads_per_worker,
            device_ids=device_ids,
        )
        running_jobs()  # clears away what killed processes left
        self._change()
        atexit.register(self.close)

    def has_devices(self, devices: int, threads_per_worker: int, device_ids: tuple[str, ...]) -> None:
        """Notes which devices the workers have that are starting; arguments as for the class."""
        self._change(
            devices=devices, threads_per_worker=threads_per_worker, device_ids=device_ids, workers=(), remote_workers=()
        )

    def has_workers(self, pids: Sequence[int]) -> None:
        """Notes the worker processes, in rank order."""
        self._change(workers=tuple(Process(pid, start_of(pid)) for pid in pids))

    def others_took_over(self, pids: Sequence[int]) -> None:
        """Notes the worker processes that have taken over from lost ones, in rank order."""
        self.losses_survived += 1
        self._change(workers=tuple(Process(pid, start_of(pid)) for pid in pids), losses_survived=self.losses_survived)

    def has_remote_workers(self, workers: Sequence[RemoteWorker]) -> None:
        """Notes what workers on other hosts use."""
        self._change(remote_workers=tuple(workers))

    def has_model(self, model: str, plan: str) -> None:
        """Notes the model called last for the first time, and its plan."""
        self._change(model=model, plan=plan)

    def close(self) -> None:
        """Removes the entry: the devices are given back. Harmless when repeated, and in a forked child."""
        atexit.unregister(self.close)
        with self._lock:
            entry, self._entry = self._entry, None
            if entry is not None and entry.process.pid == os.getpid():
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            if self._entry is None or self._entry.process.pid != os.getpid():
                return
            self._entry = replace(self._entry, **changes)
            with contextlib.suppress(OSError):
                write_whole(self._path, json.dumps(asdict(self._entry), indent=1, ensure_ascii=False) + "\n")


def folder() -> Path:
    """Returns where the entries lie."""
    return cache_folder() / "jobs"


def running_jobs() -> list[JobEntry]:
    """Returns the jobs of this machine that still run, oldest first; deletes the entries of those that do not."""
    found = []
    for path in folder().glob(f"{platform.node()}-*.json"):
        entry = _read(path)
        if entry is not None and entry.is_alive():
            found.append(entry)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda entry: (entry.started_at, entry.process.pid))


def start_of(pid: int) -> str:
    """Returns the boot and the clock tick in which a process started; empty if it does not run.

    Source: proc(5), /proc/pid/stat: the third field is the state, the 22nd the start; the second may hold spaces.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, IndexError):
        return ""
    return "" if fields[0] in "ZX" else f"{boot} {fields[19]}"


def _read(path: Path) -> JobEntry | None:
    """Returns the entry in a file, None if it is broken or gone."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return JobEntry(
            **{
                **values,
                "process": Process(**values["process"]),
                "device_ids": tuple(values.get("device_ids", ())),
                "workers": tuple(Process(**worker) for worker in values["workers"]),
                "remote_workers": tuple(RemoteWorker(**worker) for worker in values.get("remote_workers", ())),
            }
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
