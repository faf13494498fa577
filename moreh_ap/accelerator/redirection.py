"""One accelerator of one process: its workers, its session and the changes that make "cuda" mean them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moreh_ap import log
from moreh_ap.accelerator.worker_starts import SLOW_IMPORTS, WorkerStarts
from moreh_ap.device import checkpoint_tensors
from moreh_ap.device.patches import quantized_weights
from moreh_ap.device.patches.install import install
from moreh_ap.errors import OptionError
from moreh_ap.integrations import accelerate, keras, transformers
from moreh_ap.local import garbage_at_start, logger
from moreh_ap.patching import Patches
from moreh_ap.runtime.worker_group import MakeLauncher
from moreh_ap.session import run_report
from moreh_ap.session.checkpoint.autosave import AutoSave
from moreh_ap.session.model_registry import ModelRegistry
from moreh_ap.session.replay.replay_rules import SessionReplayRules
from moreh_ap.session.rng_streams import GpuGenerator, ProcessGenerator
from moreh_ap.session.session import Session
from moreh_ap.session.session_backend import SessionBackend
from moreh_ap.session.step_tracer import StepTracer, is_traced_here
from moreh_ap.session.verification import reference_worker
from moreh_ap.session.verification.first_steps_check import FirstStepsCheck
from moreh_ap.settings import Options
from moreh_ap.states import AcceleratorState
from moreh_ap.tracing import chrome_trace

if TYPE_CHECKING:
    from moreh_ap.runtime.host.host_pool import HostPool


class Accelerator:
    """Redirects this process's "cuda" to workers, which are starting.

    Args:
        options: What the script asked for.
        starts: Starts the workers.

    Attributes:
        state: How far its workers are.

    Raises:
        OptionError: If a trace or a report cannot be written.
    """

    def __init__(self, options: Options, starts: WorkerStarts) -> None:
        self.options, self.state = options, starts.state
        is_traced = bool(options.trace_file) and is_traced_here()
        is_reported = bool(options.report_folder) and is_traced_here()
        if is_reported:
            report_folder = Path(options.report_folder).absolute()
            run_report.claim(report_folder)
        if is_traced:
            trace_file = Path(options.trace_file).absolute()  # scripts may go to another folder
            chrome_trace.claim(trace_file)
        starts.make_rules = _rules
        generator = ProcessGenerator() if starts.device_type == "cpu" else GpuGenerator()
        devices = starts.num_devices, starts.num_used
        self.session = Session(options, starts.start, *devices, starts.job, generator, starts.pool)
        if options.check_steps:
            threads, num_gpus = starts.shares(starts.num_devices)[0], torch.cuda.device_count()
            beside = None if starts.pool is None else _beside(starts.pool, options.check_steps)
            start_reference = functools.partial(
                reference_worker.start,
                starts.num_devices,
                starts.device_type,
                threads,
                num_gpus,
                SLOW_IMPORTS,
                beside,
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

    def has_ended(self) -> bool:
        """Returns whether its workers are lost, and the script was told: the line may be called again."""
        return self.session.has_ended

    def close(self) -> None:
        """Undo the redirections and end the workers."""
        if self._autosave is not None:
            self._autosave.close()
        if self._tracer is not None:
            self._tracer.close()
        if self._report is not None:
            self._report.close()
        garbage_at_start.include_older_objects()
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


def _rules(starts: WorkerStarts) -> SessionReplayRules:
    """Returns what the session knows of commands that are kept for workers that take over."""
    return SessionReplayRules(lambda: starts.job.others_took_over(starts.current.pids if starts.pool is None else ()))


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
