"""One accelerator of one process: its devices, its workers, its session and the changes that make "cuda" mean it."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moreh_ap import accelerator_models, device, log
from moreh_ap.device import AcceleratorInForce, checkpoint_tensors
from moreh_ap.device.patches import quantized_weights
from moreh_ap.device.patches.install import install
from moreh_ap.errors import OptionError
from moreh_ap.integrations import accelerate, keras, transformers
from moreh_ap.local import logger
from moreh_ap.local.jobs import Job
from moreh_ap.patching import Patches
from moreh_ap.runtime import gpu_checks
from moreh_ap.runtime.launcher import Launcher
from moreh_ap.runtime.recovery.recovering_group import RecoveringWorkerGroup
from moreh_ap.runtime.worker_environment import IGNORES_SIGTERM_VARIABLE, device_ids, workers_per_gpu
from moreh_ap.runtime.worker_group import MakeLauncher, WorkerGroup
from moreh_ap.session import run_report
from moreh_ap.session.checkpoint.autosave import AutoSave
from moreh_ap.session.model_registry import ModelRegistry
from moreh_ap.session.planning import device_count
from moreh_ap.session.replay.replay_rules import SessionReplayRules
from moreh_ap.session.rng_streams import GpuGenerator, ProcessGenerator
from moreh_ap.session.session import Session
from moreh_ap.session.session_backend import SessionBackend
from moreh_ap.session.step_tracer import StepTracer, is_traced_here
from moreh_ap.session.verification import reference_worker
from moreh_ap.session.verification.first_steps_check import FirstStepsCheck
from moreh_ap.settings import Options
from moreh_ap.states import AcceleratorState, StateMachine
from moreh_ap.tracing import chrome_trace
from moreh_ap.version import __version__

if TYPE_CHECKING:
    from moreh_ap.runtime.host.hosts_launcher import HostPool

_SLOW_IMPORTS = ("transformers.modeling_utils",)
"""What the models of a script that imports these libraries need: workers import it beside the script."""

_MADE_S = 5.0  # workers take seconds to be ready, the constructor that starts them none, unless it is interrupted


class Accelerator:
    """Starts the workers in the background and redirects this process's "cuda" to them.

    Args:
        options: What the script asked for.

    Attributes:
        state: How far its workers are.

    Raises:
        OptionError: If more GPUs are asked for than there are, their driver is too old, or a trace cannot be written.
        UnsupportedError: If the script has put tensors on a GPU already.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        is_traced = bool(options.trace_file) and is_traced_here()
        is_reported = bool(options.report_folder) and is_traced_here()
        if is_reported:
            report_folder = Path(options.report_folder).absolute()
            run_report.claim(report_folder)
        if is_traced:
            trace_file = Path(options.trace_file).absolute()  # scripts may go to another folder
            chrome_trace.claim(trace_file)
        pool = _join_hosts(options) if options.hosts else None
        if pool is None:
            device_type, num_devices = resolve_devices(options.devices)
        else:
            device_type, num_devices = pool.device_type, options.devices or pool.per_host * len(pool.names)
        if device_type == "cuda" and pool is None:
            gpu_checks.check_script_process()
        num_used = device_count.devices_at_start(options, device_type, num_devices)
        taken = accelerator_models.load(device_type)
        # Many scripts go on with ``os.environ["CUDA_VISIBLE_DEVICES"] = "0"``: the devices are those of this moment.
        visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")

        def shares(count: int) -> tuple[int, tuple[str, ...]]:
            """Returns the threads of each of so many workers, and the GPUs that they have."""
            if pool is not None:
                return max(1, pool.num_cores * len(pool.names) // count), ()
            threads = max(1, len(os.sched_getaffinity(0)) // count)
            return threads, device_ids(count, visible_devices) if device_type == "cuda" else ()

        job = Job(taken.current, taken.model, device_type, num_used, *shares(num_used))

        if pool is not None:
            pool.on_usage = job.has_remote_workers

        self.state = state = StateMachine(AcceleratorState.STARTING)

        def start_workers(count: int) -> WorkerGroup:
            logger.say(log.requesting_line())
            state.enter(AcceleratorState.STARTING)
            job.has_devices(count, *shares(count))
            made = threading.Event()
            recovers = options.recovery != "off" and pool is None
            rules = SessionReplayRules(lambda: job.others_took_over(workers.pids), count)
            make = functools.partial(RecoveringWorkerGroup, rules=rules) if recovers else WorkerGroup

            def on_progress(stage: str, done: int, total: int) -> None:
                place = pool.place_of(max(0, done - 1), total) if pool is not None else f"localhost:{done - 1}"
                _log_progress(stage, done, total, place)
                if stage != "ready" or not made.wait(_MADE_S):
                    return
                if state.enter(AcceleratorState.READY, only_from=AcceleratorState.STARTING) and pool is None:
                    job.has_workers(workers.pids)

            launcher = None if pool is None else pool.launcher
            if launcher is None and options.autosave_folder:
                launcher = functools.partial(Launcher, agent_variables={IGNORES_SIGTERM_VARIABLE: "1"})
            workers = make(
                count,
                device_type=device_type,
                threads_per_worker=shares(count)[0],
                preimport=("moreh_ap.runtime.worker.executor", *_SLOW_IMPORTS),
                on_progress=on_progress,
                visible_devices=visible_devices,
                make_launcher=launcher,
                shares_memory=pool is None,
            )
            made.set()
            return workers

        generator = ProcessGenerator() if device_type == "cpu" else GpuGenerator()
        self.session = Session(options, start_workers, num_devices, num_used, job, generator)
        if options.check_steps:
            threads, num_gpus = shares(num_devices)[0], torch.cuda.device_count()
            beside = None if pool is None else _beside(pool, options.check_steps)
            start_reference = functools.partial(
                reference_worker.start, num_devices, device_type, threads, num_gpus, _SLOW_IMPORTS, beside
            )
            self.session.check = FirstStepsCheck(self.session, start_reference, options.check_steps)
        self.models = ModelRegistry(self.session)
        self._patches = redirect(self.session, self.models)
        self._report = run_report.RunReport(self.session, report_folder, is_traced=is_traced) if is_reported else None
        self._autosave: AutoSave | None = None
        if options.autosave_folder and is_traced_here():
            autosave_folder = str(Path(options.autosave_folder).absolute())  # scripts may go to another folder
            self._autosave = AutoSave(self.session, autosave_folder, 60.0 * options.autosave_minutes)
        self._tracer: StepTracer | None = None
        if is_traced:

            def say_where(first: int, last: int, is_early: bool) -> None:
                logger.say(log.trace_line(first, last, str(trace_file), is_early))

            self._tracer = StepTracer(self.session, trace_file, *options.trace_steps, done=say_where)

    def in_use(self) -> bool:
        """True once a model has moved to the workers."""
        return self.models.any()

    def close(self) -> None:
        """Undo the redirections and end the workers."""
        if self._autosave is not None:
            self._autosave.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._report is not None:
            self._report.close()
        self.state.enter(AcceleratorState.CLOSED)
        self._patches.undo()
        self.session.close()


def redirect(session: Session, models: ModelRegistry) -> Patches:
    """Makes "cuda" mean the accelerator of a session, in PyTorch and in the libraries above it."""
    patches = install(SessionBackend(session, models))
    transformers.install(patches, checkpoint_tensors)
    accelerate.install(patches)
    quantized_weights.install(patches)
    keras.install(patches)
    return patches


class _Makes:
    """What the one line makes: an `Accelerator`, unless a dry run says otherwise."""

    make: Callable[[Options], AcceleratorInForce] = Accelerator


MAKES = _Makes()


def enable(options: Options) -> None:
    """Make "cuda" mean an accelerator with these options; with the same options again, nothing happens.

    Raises:
        OptionError: If an accelerator with other options is in use already.
    """
    in_force = device.current()
    if in_force is not None:
        if in_force.options == options:
            return
        if in_force.options.hosts != options.hosts:
            raise OptionError(
                "The accelerator has other hosts already.",
                allowed="the hosts of the first call",
                fix="torch.moreh.option.enable_advanced_parallelization(hosts=...)  # once, before anything else",
            )
        if in_force.in_use():
            raise OptionError(
                f"The accelerator is in use with {in_force.options}; it cannot take other options now.",
                allowed="One call, or further calls with the same arguments, before the accelerator is used.",
                fix="torch.moreh.option.enable_advanced_parallelization(...)  # once, before the first model call",
            )
        device.disable()
    device.put_in_force(MAKES.make(options))


def _join_hosts(options: Options) -> HostPool:
    """Returns the hosts of the options, which have joined; waits for them."""
    from moreh_ap.runtime.host.hosts_launcher import HostPool

    return HostPool(options.hosts, options.devices, logger.say)


def _beside(pool: HostPool, check_steps: int) -> MakeLauncher:
    """Returns what starts the worker that checks, on this machine.

    Raises:
        OptionError: The hosts have GPUs, and this machine has none.
        MeshStartError: This machine cannot have a worker.
    """
    if pool.device_type == "cuda" and not torch.cuda.device_count():
        raise OptionError(
            f"MOREH_CHECK={check_steps}: the worker that checks is on the script's machine, which has no GPU",
            allowed="a script that runs on one of the hosts",
            fix="export MOREH_CHECK=0",
            link="docs/several-machines.md#check",
        )
    return pool.beside().launcher


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


def _log_progress(stage: str, done: int, total: int, place: str) -> None:
    if stage == "spawn":
        logger.say(log.daemon_line())
    elif stage == "connect":
        logger.say(log.connecting_line(done, total, place))
    elif stage == "link":
        logger.say(log.links_line())
    elif stage == "ready":
        logger.say(log.ready_line())
        logger.say(log.version_line(__version__))
        logger.say(log.job_line(os.getpid()))
