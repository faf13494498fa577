"""Compares the predictions for a model's plan with its first steps, logs the result once, and saves it.

Decides after how many steps to compare, and which figures correct later predictions on this machine. Must not know how
figures are predicted or measured.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch.optim import Optimizer

from moreh_ap import log
from moreh_ap.local import logger
from moreh_ap.local.cache_files import CacheFile
from moreh_ap.local.interrupts import wait_in_turns
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import UNCORRECTED, Corrections
from moreh_ap.protocol.messages.devices import ReportSteps, StepReport
from moreh_ap.session.outbox import Outbox, Posted
from moreh_ap.session.planning import device_count_records

FILE = CacheFile("learned.json")

LOOKS_AFTER_STEPS = 6
"""The first step builds the optimizer's state and is left out; the median of five others is like later ones."""

_LEAST_STEPS = 3
_KEPT_RUNS = 50
_LEAST_S = 0.01
_LEAST_BYTES = 2**30
"""Shorter steps and smaller models are not used: fixed costs dominate them."""

_OTHERS_TIME, _OTHERS_MEMORY = 2.0, 1.25
"""By how much runs of other models correct a prediction at most, up or down. Models that are counted layer by layer are
off by far more than those whose shape is known, and memory that is underestimated ends a run."""

_MOST = 1e18
"""Upper limit of a valid figure of a run, in seconds or bytes."""


@dataclass(frozen=True)
class Expected:
    """The predictions that a watch compares with.

    Attributes:
        machine: The name under which the machine's runs are saved.
        model: Name of the model.
        batch: Rows of a step.
        chosen: The plan with its predictions.
        corrections: The corrections from earlier runs in these predictions; removed before a run is saved.
        script: The name under which it is saved that this model has fewer devices than there are; empty if it has all,
            or if another model decided the number.
    """

    machine: str
    model: str
    batch: int
    chosen: Candidate
    corrections: Corrections
    script: str = ""


class Watch:
    """Counts the steps of one model.

    Args:
        outbox: The outbox to the workers.
        expected: The predictions.
        done: Called when the watch ends, with the optimizer and the seconds from one of its steps to the next; None
            if workers failed.
        waits: Whether the last of the steps waits for the workers. Otherwise the watch ends some steps later, if the
            script sends ahead, and none waits.
    """

    def __init__(
        self,
        outbox: Outbox,
        expected: Expected,
        done: Callable[[Optimizer, float | None], object],
        *,
        waits: bool = False,
    ) -> None:
        self._outbox, self._expected, self._on_done, self._waits = outbox, expected, done, waits
        self._stepped_at: list[float] = []
        self._asked: Posted | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None

    def stepped(self, optimizer: Optimizer) -> None:
        """Counts a step that was sent, of the optimizer that stepped first."""
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        self._stepped_at.append(time.perf_counter())
        if len(self._stepped_at) < LOOKS_AFTER_STEPS:
            return
        if self._asked is None:
            self._asked = self._outbox.post_soon(ReportSteps())
            if not self._waits:
                return
            answered = threading.Event()
            self._asked.add_done_callback(lambda _: answered.set())
            wait_in_turns(answered.wait)
        if self._asked.failed():
            self._on_done(optimizer, None)  # the script gets the error when it reads a result
        elif self._asked.done():
            self._on_done(optimizer, self._compare(list(self._asked.result())))

    def stepped_here(self, optimizer: Optimizer) -> None:
        """Does not count a step of another model, in the script's own process."""

    def _compare(self, reports: list[StepReport]) -> float:
        """Returns the seconds from one step to the next: a script that reads no loss sends ahead of the workers."""
        between_s = statistics.median(
            after - before for before, after in zip(self._stepped_at[1:], self._stepped_at[2:])
        )
        if min(len(one.seconds) for one in reports) < _LEAST_STEPS:
            return between_s  # gradients of several calls are accumulated, or several optimizers step: not predicted
        seconds = max(statistics.median(one.seconds[1:]) for one in reports)
        peak_bytes = max(one.peak_bytes for one in reports)
        chosen = self._expected.chosen
        assert chosen.step is not None  # a chosen plan has been timed
        logger.say(log.measured_line(chosen, seconds, peak_bytes))
        remember_run(self._expected, max(one.seconds[0] for one in reports), seconds, peak_bytes)
        fewer = device_count_records.look_up(self._expected.script)
        if fewer is not None and fewer.is_worse_than_all(seconds):
            device_count_records.forget(self._expected.script)
            logger.say(log.slower_than_all_line(fewer.devices, fewer.all_devices, seconds, fewer.all_s))
        return max(seconds, between_s)


def corrections_of(machine: str, otherwise: Corrections = UNCORRECTED, model: str = "") -> Corrections:
    """Returns the factors by which predictions for this machine were off: medians over its saved runs.

    Runs of the model count alone if there are any. Those of others say what is wrong with the machine's figures, and as
    much about how well the others are known, so that their factors count within narrow limits. Runs that were edited
    by hand, or that lack a figure, are left out.

    Args:
        machine: The name under which the machine's runs are saved.
        otherwise: The factors that hold if no run says one.
        model: Name of the model; empty: runs of all models count alike.
    """
    runs = runs_of(machine)
    written = [run for run in runs if "compile=" not in str(run.get("plan"))]  # the prediction is for such
    time = _median_off(written or runs, model, ("measured_s", "predicted_s", _LEAST_S), _OTHERS_TIME)
    memory = _median_off(runs, model, ("measured_bytes", "predicted_bytes", _LEAST_BYTES), _OTHERS_MEMORY)
    return Corrections(
        time=otherwise.time if time is None else time, memory=otherwise.memory if memory is None else memory
    )


def _median_off(
    runs: list[dict[str, Any]], model: str, figures: tuple[str, str, float], most_of_others: float
) -> float | None:
    """Returns the median of measured over predicted, None without a valid run; arguments as for `corrections_of`."""
    off = [(run.get("model") == model, found) for run in runs if (found := _off(run, *figures)) is not None]
    own = [found for is_own, found in off if is_own]
    if own or not model:
        factors = own if model else [found for _, found in off]
        return statistics.median(factors) if factors else None
    if not off:
        return None
    return min(max(statistics.median(found for _, found in off), 1.0 / most_of_others), most_of_others)


def runs_of(machine: str) -> list[dict[str, Any]]:
    """Returns the saved runs of a machine that have a valid form."""
    runs = (FILE.look_up(machine) or {}).get("runs")
    return [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []


def seconds_of(run: dict[str, Any], name: str) -> float | None:
    """Returns a time of a run; None if it is too short, invalid or was not saved."""
    found = run.get(name)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not _LEAST_S <= found < _MOST:
        return None
    return float(found)


def _off(run: dict[str, Any], measured: str, predicted: str, least: float) -> float | None:
    """Returns a figure of a run divided by its prediction; None if the figure is too small or invalid."""
    figures = (run.get(measured), run.get(predicted))
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) for one in figures):
        return None
    found, expected = figures
    if not (least <= found < _MOST and 0.0 < expected < _MOST):  # type: ignore[operator]
        return None
    return float(found / expected)  # type: ignore[operator]


def remember_run(expected: Expected, first_s: float, seconds: float, peak_bytes: float) -> None:
    """Saves the time and memory of a plan's steps, for later predictions on this machine.

    Args:
        expected: The predictions.
        first_s: Seconds of the first step.
        seconds: Median of the others.
        peak_bytes: Bytes that the fullest device held.
    """
    chosen, corrections = expected.chosen, expected.corrections
    assert chosen.step is not None
    run: dict[str, Any] = {
        "model": expected.model,
        "plan": str(chosen.plan),
        "batch": expected.batch,
        "predicted_s": float(f"{chosen.step.total_s / corrections.time:.4g}"),
        "first_s": float(f"{first_s:.4g}"),
        "measured_s": float(f"{seconds:.4g}"),
        "predicted_bytes": round(chosen.memory.reserved_bytes / corrections.memory),
        "measured_bytes": round(peak_bytes),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    keep_run(expected.machine, run)


def keep_run(machine: str, run: dict[str, Any]) -> None:
    """Saves a run of a machine, and as many others as are kept."""
    with contextlib.suppress(OSError):  # the folder cannot be written: the run is lost
        FILE.keep(machine, {"runs": [*runs_of(machine), run][-_KEPT_RUNS:]})
