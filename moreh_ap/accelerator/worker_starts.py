"""The worker groups of one accelerator: on which devices, and when the first of them begins.

Decides how many devices an accelerator has, and starts its workers, again where others are needed. Must not know what
is done with them: the session is not imported here.

[Note: ahead]
Workers import PyTorch and this package for seconds. So the first group begins before the script's process imports the
rest of this package, and both import at the same time.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from moreh_ap import accelerator_models
from moreh_ap.accelerator import start_log
from moreh_ap.errors import OptionError
from moreh_ap.local import logger
from moreh_ap.local.jobs import Job
from moreh_ap.runtime import gpu_checks
from moreh_ap.runtime.launcher import Launcher
from moreh_ap.runtime.recovery.elastic_launcher import ElasticLauncher
from moreh_ap.runtime.recovery.missing_devices import MissingDevices
from moreh_ap.runtime.recovery.past import Past
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.recovery.rules import ReplayRules
from moreh_ap.runtime.worker_environment import IGNORES_SIGTERM_VARIABLE, device_ids, workers_per_gpu
from moreh_ap.runtime.worker_group import WorkerGroup
from moreh_ap.session.planning.device_count_records import devices_at_start
from moreh_ap.settings import Options
from moreh_ap.states import AcceleratorState, StateMachine

if TYPE_CHECKING:
    from moreh_ap.runtime.host.host_pool import HostPool

SLOW_IMPORTS = ("torch._dynamo", "transformers.modeling_utils")
"""What the models of a script that imports these libraries need: it is imported once for all workers, beside the
script. PyTorch's optimizers and sharded tensors import the first, which takes 0.65 s of a core, when they are used."""

_MADE_S = 5.0  # workers take seconds to be ready, the constructor that starts them none, unless it is interrupted


class WorkerStarts:
    """Starts the workers of an accelerator; the first group of them at once. See [Note: ahead].

    Args:
        options: What the script asked for.

    Attributes:
        state: How far the workers are.
        pool: The hosts, None where the devices are this machine's.
        device_type, num_devices: Kind and number of the accelerator's devices.
        num_used: How many of them have a worker at first.
        job: What other processes of the machine see of it.
        make_rules: Returns what is known of commands that are kept; set by the accelerator.

    Raises:
        MeshStartError: A host cannot join.
        OptionError: More GPUs are asked for than there are, or their driver is too old.
        UnsupportedError: The script has put tensors on a GPU already.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.pool = pool = _join_hosts(options) if options.hosts else None
        if pool is None:
            self.device_type, self.num_devices = resolve_devices(options.devices)
        else:
            self.device_type, self.num_devices = pool.device_type, options.devices or pool.per_host * len(pool.names)
        if self.device_type == "cuda" and pool is None:
            gpu_checks.check_script_process()
        self.num_used = devices_at_start(options, self.device_type, self.num_devices)
        taken = accelerator_models.load(self.device_type)
        # Many scripts go on with ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``: the devices are those of this moment.
        self._visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        shares = self.shares(self.num_used)
        self.job = Job(taken.current, taken.model, self.device_type, self.num_used, *shares)
        if pool is not None:
            pool.on_usage = self.job.has_remote_workers
        self.state = StateMachine(AcceleratorState.STARTING)
        self.make_rules: Callable[[WorkerStarts], ReplayRules]
        self.current: WorkerGroup
        self._recovers = _recovers(options, self.device_type)
        self._missing = MissingDevices()
        self._ahead: WorkerGroup | None = self._start(self.num_used)

    def shares(self, count: int) -> tuple[int, tuple[str, ...]]:
        """Returns the threads of each of so many workers, and the GPUs that they have."""
        if self.pool is not None:
            return max(1, self.pool.num_cores * len(self.pool.names) // count), ()
        threads = max(1, len(os.sched_getaffinity(0)) // count)
        return threads, device_ids(count, self._visible_devices) if self.device_type == "cuda" else ()

    def start(self, count: int, past: Past | None = None) -> WorkerGroup:
        """Returns so many workers, which are starting: those that began ahead, or others.

        Args:
            count: How many.
            past: Commands that they execute first, which workers before them had executed.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.num_workers == count:
            return ahead
        return self._start(count, past)

    def close(self) -> None:
        """Ends the workers, whoever has them: for an accelerator that cannot be made."""
        self.current.close()

    def _start(self, count: int, past: Past | None = None) -> WorkerGroup:
        if past is None:  # else one line says all, once they have been told
            logger.say(start_log.requesting_line())
        elif past.is_loss and count < self.current.num_workers:
            self._missing.lost(self.current.num_workers)
        self.state.enter(AcceleratorState.STARTING)
        self.job.has_devices(count, *self.shares(count))
        made, pool = threading.Event(), self.pool

        def on_progress(stage: str, done: int, total: int) -> None:
            place = pool.place_of(max(0, done - 1), total) if pool is not None else f"localhost:{done - 1}"
            if past is None:
                start_log.say_progress(stage, done, total, place)
            if stage != "ready" or not made.wait(_MADE_S):
                return
            if self.state.enter(AcceleratorState.READY, only_from=AcceleratorState.STARTING) and pool is None:
                self.job.has_workers(workers.pids)

        variables = {IGNORES_SIGTERM_VARIABLE: "1"} if self._options.autosave_folder else {}
        elastic = functools.partial(ElasticLauncher, missing=self._missing)
        here = functools.partial(elastic if self._options.elastic else Launcher, agent_variables=variables)
        make: Callable[..., WorkerGroup] = WorkerGroup
        if self._recovers:
            is_frugal = self._options.recovery == "auto"
            make = functools.partial(
                RecoveringWorkerGroup, make_rules=lambda: self.make_rules(self), is_frugal=is_frugal, past=past
            )
        workers = self.current = make(
            count,
            device_type=self.device_type,
            threads_per_worker=self.shares(count)[0],
            preimport=("moreh_ap.runtime.worker.executor", *SLOW_IMPORTS),
            on_progress=on_progress,
            visible_devices=self._visible_devices,
            make_launcher=here if pool is None else pool.launcher,
            shares_memory=pool is None,
        )
        made.set()
        return workers


def _recovers(options: Options, device_type: str) -> bool:
    """Returns whether others take over from lost workers: on GPUs, where its cost is not known, only if asked for."""
    return options.recovery == "memory" or (options.recovery == "auto" and device_type == "cpu")


def _join_hosts(options: Options) -> HostPool:
    """Returns the hosts of the options, which have joined; waits for them."""
    from moreh_ap.runtime.host.host_pool import HostPool

    elastic, file = options.elastic, options.hosts_file
    return HostPool(options.hosts, options.devices, logger.say, others_may_join=elastic, file=file)


def resolve_devices(asked: int | None) -> tuple[str, int]:
    """The kind and number of devices: GPUs where there are any, else CPU workers.

    Args:
        asked: How many the script wants; None: as many as the chosen model of the accelerator has, and where none was
            chosen all GPUs, or one CPU worker a core. More CPU workers than cores are allowed.

    Raises:
        OptionError: There are fewer GPUs.
    """
    # Asks the driver's management library: no CUDA context is created.
    num_gpus = torch.cuda.device_count() * workers_per_gpu()
    if asked is None:
        device_type, available = ("cuda", num_gpus) if num_gpus else ("cpu", len(os.sched_getaffinity(0)))
        supply = accelerator_models.Supply(device_type, available)
        return device_type, accelerator_models.chosen_devices(supply) or available
    if asked <= num_gpus:
        return "cuda", asked
    if num_gpus:
        raise OptionError(
            f"devices={asked} was asked for, but this machine has {num_gpus} GPUs.",
            allowed=f"1 to {num_gpus}; to use CPU workers instead, hide the GPUs.",
            fix=f"torch.moreh.option.enable_advanced_parallelization(devices={num_gpus})",
        )
    return "cpu", asked
