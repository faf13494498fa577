"""Records a run and writes its report, where the script asks for one.

Decides what is recorded when, and when the files are written. Must not know how the page looks. Nothing here waits for
a worker before the script ends, except for the one step that is traced (`step_tracer.py`).

[Note: losses]
The loss of a step is what `backward` was called on. Its value is taken when the workers have answered, which is when
the script reads it or soon after; a value that has not come at the end of the run stays unknown.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import platform
import statistics
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moreh_ap import log
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import OptionError
from moreh_ap.local import cache_files, logger
from moreh_ap.patching import Patches
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.protocol.messages.devices import ReportSteps
from moreh_ap.reporting import page
from moreh_ap.reporting import run_record as records
from moreh_ap.reporting.run_record import PlanFigures, PlannedModel, RunRecord, Step
from moreh_ap.session.planning.plan_selection import Planned
from moreh_ap.session.session import Session
from moreh_ap.session.step_tracer import StepTracer
from moreh_ap.states import SessionState
from moreh_ap.version import __version__

_TRACED_AFTER = 8
"""Steps before the one that is traced: earlier ones are compared with their prediction."""

_SHOWN_PLANS = 5
_ANSWER_S = 10.0
_WRITTEN_EVERY_S = 30.0
_MOST_SPANS = 2000


def claim(folder: Path) -> None:
    """Makes the folder and an empty record in it, so that one that cannot be written is known before the training.

    Raises:
        OptionError: It cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / records.RECORD_FILE).write_text("{}\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"report: {str(folder)!r} cannot be written: {error.strerror}",
            "a folder that can be made and written to",
            "MOREH_REPORT=report python train.py",
            records.LINK,
        ) from error


class RunReport:
    """Records from its making until `close`, or until the script ends.

    Args:
        session: The session of the workers.
        folder: Where the files are written.
        is_traced: Whether the script asks for a trace itself: then the report has none.
    """

    def __init__(self, session: Session, folder: Path, *, is_traced: bool) -> None:
        self._session, self._folder = session, folder
        self._pid = os.getpid()
        self._record = RunRecord(records.shown_command(sys.argv), _now())
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._stepped_at: float | None = None
        self._written_at = time.monotonic()
        self._rows = self._tokens = 0
        self._roots: list[Tensor] = []  # what `backward` was called on since the last step
        self._unread: deque[tuple[int, list[Tensor]]] = deque()  # the step, and what `backward` was called on in it
        self._tracer: StepTracer | None = None
        self._may_trace = not is_traced
        self._lines = _Lines(self._record)
        logger.listen(self._lines)
        self._patches = Patches()
        self._replace()
        self._patches.on_undo(register_optimizer_step_post_hook(self._after_step).remove)
        session.report = self
        atexit.register(self._at_exit)

    def planned(self, root: nn.Module, planned: Planned, reason: str) -> None:
        """Records a model's plan, and the next ones."""
        self._come_first_at_exit()
        chosen = planned.chosen
        others = [one for one in planned.candidates if one.plan != chosen.plan and one.step is not None]
        self._record.models.append(
            PlannedModel(
                type(root).__name__,
                _figures(chosen),
                reason,
                [] if planned.is_given else [_figures(one) for one in others[:_SHOWN_PLANS]],
                dict(chosen.memory.components),
                chosen.usable_bytes,
                planned.task.global_batch,
            )
        )

    def close(self) -> None:
        """Stops recording and writes the report."""
        atexit.unregister(self._at_exit)
        self._session.report = None
        if self._tracer is not None:
            self._tracer.close()
        self._patches.undo()
        logger.forget(self._lines)
        self._ask_workers()
        self._write("finished" if self._error() is None else f"ended by {self._error()}")
        logger.say(log.report_line(str(self._folder / records.PAGE_FILE)))

    def _replace(self) -> None:
        group = self._patches.group("A report of the run is made.")
        inside = _Inside()

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Calls a module, and counts the rows of a training call."""
            if not inside.depth and torch.is_grad_enabled() and next(module.parameters(), None) is not None:
                self._count((*args, *kwargs.values()))
            inside.depth += 1
            try:
                return original_call(module, *args, **kwargs)
            finally:
                inside.depth -= 1

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            """Runs a backward, and keeps what it begins at."""
            result = original_backward(tensors, *args, **kwargs)
            self._roots += [one.detach() for one in tensors if isinstance(one, Tensor) and one.numel() == 1]
            return result

        def show(message: Any, category: type[Warning], filename: str, lineno: int, *args: Any) -> None:
            """Shows a warning, and records one of this package."""
            if category.__module__.startswith("moreh_ap"):
                said = {"category": category.__name__, "text": str(message), "place": f"{filename}:{lineno}"}
                self._record.warnings.append(said)
            original_show(message, category, filename, lineno, *args)

        original_call = group.replace(nn.Module, "__call__", call)
        original_backward = group.replace(torch.autograd, "_engine_run_backward", backward)
        original_show = group.replace(warnings, "showwarning", show)

    def _count(self, arguments: tuple[Any, ...]) -> None:
        tensors = [one for one in arguments if isinstance(one, Tensor) and one.dim()]
        if not tensors:
            return
        self._rows += tensors[0].shape[0]
        words = next((one for one in tensors if one.dim() == 2 and not one.is_floating_point()), None)
        self._tokens += 0 if words is None else words.numel()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self._come_first_at_exit()  # others may have taken the place of workers
        now = time.perf_counter()
        seconds = None if self._stepped_at is None else now - self._stepped_at
        self._stepped_at = now
        self._record.steps.append(Step(seconds, self._rows, self._tokens))
        self._unread.append((len(self._record.steps) - 1, self._roots))
        self._rows = self._tokens = 0
        self._roots = []
        self._take_losses()
        if self._may_trace and len(self._record.steps) == _TRACED_AFTER:
            self._trace_next()
        if time.monotonic() - self._written_at > _WRITTEN_EVERY_S:
            self._write("running")

    def _take_losses(self) -> None:
        """Records the losses of steps that the workers have answered, oldest first. Never waits."""
        while self._unread and all(_is_ready(root) for root in self._unread[0][1]):
            number, roots = self._unread.popleft()
            values = [float(_read(root)) for root in roots]
            step, loss = self._record.steps[number], statistics.fmean(values) if values else math.nan
            known = loss if math.isfinite(loss) else None
            self._record.steps[number] = Step(step.seconds, step.rows, step.tokens, known)

    def _trace_next(self) -> None:
        """Has the step after the next one traced."""
        self._may_trace = False
        self._tracer = StepTracer(self._session, self._folder / records.TRACE_FILE, 2, 2, done=self._traced)
        self._come_first_at_exit()  # this closes the tracer

    def _traced(self, first: int, last: int, is_early: bool) -> None:
        events = json.loads((self._folder / records.TRACE_FILE).read_text(encoding="utf-8"))["traceEvents"]
        names = {(one["name"], one["pid"], one["tid"]): one["args"] for one in events if one["ph"] == "M"}
        for one in [event for event in events if event["ph"] == "X"][:_MOST_SPANS]:
            self._record.timeline.append(
                {
                    "name": one["name"],
                    "category": one["cat"],
                    "process": names["process_name", one["pid"], 0]["name"],
                    "lane": names["thread_name", one["pid"], one["tid"]]["name"],
                    "began_ms": one["ts"] / 1000,
                    "ms": one["dur"] / 1000,
                }
            )

    def _ask_workers(self) -> None:
        """Records the devices and what they held; workers that have no model or cannot answer leave that open."""
        if self._session.outbox.state.current is SessionState.EMPTY:
            return
        with contextlib.suppress(Exception):  # of any class: the script may have ended because of it
            self._take_losses()
            self._session.outbox.flush()
            found = self._session.workers.submit(ReportSteps()).result(_ANSWER_S)
            self._record.peak_bytes = [one.peak_bytes for one in found]
            devices = self._session.devices()
            self._record.devices = [{"name": one.name, "num_bytes": one.memory_bytes} for one in devices]
            self._take_losses()

    @staticmethod
    def _error() -> str | None:
        error = getattr(sys, "last_value", None)  # set where Python has printed a traceback
        return None if error is None else f"{type(error).__name__}: {error}".splitlines()[0]

    def _write(self, ending: str) -> None:
        record = self._record
        record.ended, record.ending, self._written_at = _now(), ending, time.monotonic()
        record.versions = {
            "moreh_ap": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        }
        record.variables = records.shown_variables(os.environ)
        record.losses_survived = self._session.job.losses_survived
        try:
            cache_files.write_whole(self._folder / records.RECORD_FILE, record.to_json())
            cache_files.write_whole(self._folder / records.PAGE_FILE, page.make(record))
        except OSError as error:
            logger.say(f"the report cannot be written: {error}")

    def _come_first_at_exit(self) -> None:
        """Exit handlers run last in, first out, and workers register theirs whenever some have started."""
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:  # a forked child has not trained
            self.close()


class _Lines(logging.Handler):
    """Adds the lines of the log to a record, and those that say what is slow."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__()
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._record.log.append(text)
        place = getattr(record, logger.SLOW_AT, "")
        if place:
            self._record.slow.append({"text": text, "place": place})


class _Inside(threading.local):
    """How many calls of modules this thread is in."""

    depth = 0


def _is_ready(root: Tensor) -> bool:
    return not isinstance(root, VirtualTensor) or root._cell.value.ready()


def _read(root: Tensor) -> Tensor:
    return root._cell.value.read() if isinstance(root, VirtualTensor) else root


def _figures(candidate: Candidate) -> PlanFigures:
    return PlanFigures(str(candidate.plan), candidate.seconds, candidate.memory.reserved_bytes)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
