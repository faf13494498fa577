"""One accelerator of one process: its devices, its workers, its session and the changes that make "cuda" mean it."""

from __future__ import annotations

import os
import sys

import torch

import moreh_ap
from moreh_ap.device import patches
from moreh_ap.integrations import transformers
from moreh_ap.option import Options
from moreh_ap.planner import report
from moreh_ap.runtime.mesh import WorkerMesh
from moreh_ap.session.session import Session
from moreh_ap.session.units import Units


class Accelerator:
    """Starts the workers in the background and redirects this process's "cuda" to them.

    Args:
        options: What the script asked for.

    Raises:
        OptionError: If more GPUs are asked for than there are.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        device_type, num_devices = resolve_devices(options.devices)
        cores = len(os.sched_getaffinity(0))
        _log(report.requesting_line())
        mesh = WorkerMesh(
            num_devices,
            device_type=device_type,
            threads_per_worker=max(1, cores // num_devices),
            preimport=("moreh_ap.runtime.worker", *_slow_imports()),
            on_progress=_log_progress,
        )
        self.session = Session(options, mesh)
        self.units = Units(self.session)
        self._patches = patches.install(self.session, self.units)
        transformers.install(self._patches.replace, self._patches.on_undo)

    def in_use(self) -> bool:
        """True once a model has moved to the workers."""
        return self.units.any()

    def close(self) -> None:
        """Undo the redirections and end the workers."""
        self._patches.undo()
        self.session.close()


def resolve_devices(asked: int | None) -> tuple[str, int]:
    """The kind and number of devices: GPUs where there are any, else one CPU worker a core.

    Args:
        asked: How many the script wants; None for all. More CPU workers than cores are allowed.
    """
    num_gpus = torch.cuda.device_count()  # asks the driver's management library: no CUDA context is created
    if num_gpus and (asked is None or asked <= num_gpus):
        return "cuda", asked or num_gpus
    if num_gpus and asked is not None:
        from moreh_ap.errors import OptionError

        raise OptionError(
            f"devices={asked} was asked for, but this machine has {num_gpus} GPUs.",
            allowed=f"1 to {num_gpus}; to use CPU workers instead, hide the GPUs.",
            fix=f"torch.moreh.option.enable_advanced_parallelization(devices={num_gpus})",
        )
    return "cpu", asked or len(os.sched_getaffinity(0))


def _slow_imports() -> tuple[str, ...]:
    """What the script's models will probably need: workers import it while the script goes on."""
    return ("transformers.modeling_utils",) if "transformers" in sys.modules else ()


def _log(line: str) -> None:
    print(line, flush=True)


def _log_progress(stage: str, done: int, total: int) -> None:
    if stage == "spawn":
        _log(report.daemon_line())
    elif stage == "connect":
        _log(report.connecting_line(done, total, f"localhost:{done - 1}"))
    elif stage == "link":
        _log(report.links_line())
    elif stage == "ready":
        _log(report.ready_line())
        _log(report.version_line(moreh_ap.__version__))
        _log(report.job_line(os.getpid()))
