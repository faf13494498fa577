"""Where the steps of models take less time: in the script's own process or on workers on CPUs. Tried once, remembered.

Decides which models are tried here, for how many steps, and which place wins. Must not know how a model changes places,
nor how it runs in either, nor when it may leave one.

[Note: the faster place]
Workers on CPUs share the cores that one process would use alone, so that splitting a batch gains little, and messages
and collectives have to be paid for; a call that every worker computes whole costs as many times as there are workers.
No prediction tells the two places apart well enough: kernels of one thread and of several differ by more. So once the
steps on the workers have been timed (`step_watch.py`), the next few steps run here, exactly as they would there. The
slower place is left, and other runs of the same model with the same batch go to the faster one at once. GPUs are not
compared: no step on this process's cores is faster than on them, and a call that all of them compute takes as long as
on one.

[Note: models that train together]
A generator and a discriminator, an actor and a critic, a student and its frozen teacher take turns in a step of the
script: what one of them would gain alone is not what they gain together, since values would go back and forth between
the places. So all models that the script has called since the latest of them was laid out change places together, and
are compared by the time from one step of an optimizer to the next of the same one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from torch import nn
from torch.optim import Optimizer

from moreh_ap import log
from moreh_ap.local import logger
from moreh_ap.local.cache_files import CacheFile
from moreh_ap.local.identity_tables import IdentityTable
from moreh_ap.session.planning.model_profiling import identity_of
from moreh_ap.session.planning.packed_weights import has_packed_weights
from moreh_ap.session.session import Session

FILE = CacheFile("own_process.json")

MAX_BYTES = 2**28
"""Of the parameters of models that change places together. More, with the optimizers' state, would take seconds."""

_SKIPPED, _COUNTED = 2, 3
"""Steps: in the first, operations run one by one, and the next keeps what it starts from. Then the median counts."""

_MAX_ASKED = 1000
"""Calls before which models cannot change places, and after which they stay where they are."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, from one step of the optimizer to the next.

    Attributes:
        models: The classes of the models that took part in it.
        here: In the script's own process.
        on_workers: On the workers.
        num_workers: Their number.
    """

    models: str
    here: float
    on_workers: float
    num_workers: int

    @property
    def is_faster_here(self) -> bool:
        """Whether steps take less time in the script's own process."""
        return self.here < self.on_workers

    def line(self) -> str:
        """Returns the line for the log."""
        return log.places_line(self.models, self.here, self.on_workers, self.num_workers, is_here=self.is_faster_here)


class _Due:
    """Models that are to be timed in this process.

    Args:
        roots: The models.
        trial: Times them.
    """

    def __init__(self, roots: Iterable[nn.Module], trial: StepTrial) -> None:
        self.roots: IdentityTable[nn.Module, bool] = IdentityTable()
        self.roots.update((root, True) for root in roots)
        self.trial, self.times_asked = trial, 0


class FasterPlace:
    """Which models were timed in both places, and which is to be.

    Args:
        session: Its workers are the other place, and its options say whether models may leave them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._keys: IdentityTable[nn.Module, str] = IdentityTable()
        self._due: _Due | None = None

    def known_times(self, root: nn.Module, call: Any) -> StepTimes | None:
        """Returns what was measured of a model in this or an earlier run; None if nothing was.

        Args:
            root: The model.
            call: Positional and keyword arguments of the call for which it is laid out.
        """
        return self._look_up(self._key(root, call), type(root).__name__) if self._may_be_here() else None

    def note_layout(self, root: nn.Module, call: Any) -> None:
        """Records the call for which a model was laid out on the workers."""
        if self._may_be_here() and not has_packed_weights(root):
            self._keys[root] = self._key(root, call)

    def measured_on_workers(self, roots: Sequence[nn.Module], optimizer: Optimizer, step_s: float) -> None:
        """Has the next calls of models ask whether they are tried here.

        Args:
            roots: All models on the workers that take part in a step.
            optimizer: One of their optimizers.
            step_s: Seconds from one of its steps to the next.
        """
        keys = [self._keys.get(root, "") for root in roots]
        num_bytes = sum(
            parameter.numel() * parameter.element_size() for root in roots for parameter in root.parameters()
        )
        if not self._may_be_here() or not all(keys) or num_bytes > MAX_BYTES:
            return
        names = ", ".join(sorted({type(root).__name__ for root in roots}))
        if any(self._look_up(key, names) is None for key in keys):
            self._due = _Due(roots, StepTrial(names, keys, optimizer, step_s, self._session.num_devices))

    def is_due(self, root: nn.Module) -> bool:
        """Returns whether a model is to be timed here, once it may leave the workers."""
        return self._due is not None and root in self._due.roots

    def put_off(self) -> None:
        """Records that the models could not leave the workers before a call."""
        if self._due is not None:
            self._due.times_asked += 1
            if self._due.times_asked >= _MAX_ASKED:
                self._due = None

    def take_due(self) -> StepTrial:
        """Returns the trial of the models that are due, which are no longer."""
        assert self._due is not None  # the caller has asked
        due, self._due = self._due, None
        return due.trial

    def _may_be_here(self) -> bool:
        options = self._session.options
        return self._session.device_type == "cpu" and options.leaves_layout_open and not options.asks_for_devices

    def _look_up(self, key: str, name: str) -> StepTimes | None:
        entry = FILE.look_up(key) or {}
        times, models = (entry.get("here_s"), entry.get("on_workers_s")), entry.get("models", name)
        if not all(type(one) is float and one > 0 for one in times) or type(models) is not str:
            return None
        return StepTimes(models, *times, self._session.num_devices)  # type: ignore[arg-type]

    def _key(self, root: nn.Module, call: Any) -> str:
        return f"{identity_of(root, call)}, {self._session.num_devices} workers, {os.cpu_count()} cores"


class StepTrial:
    """Times the steps of models in the script's own process.

    Args:
        models: Their classes.
        keys: Under which the result is kept, one for each model.
        optimizer: Its steps are counted.
        on_workers_s: Seconds of a step on the workers.
        num_workers: Their number.
    """

    def __init__(
        self, models: str, keys: list[str], optimizer: Optimizer, on_workers_s: float, num_workers: int
    ) -> None:
        self._models, self._keys, self._on_workers_s, self._num_workers = models, keys, on_workers_s, num_workers
        self._stepped_at: list[float] = []
        self._optimizer = weakref.ref(optimizer)
        self.ended: Callable[[StepTimes], object] | None = None
        """Called once with the result."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Does not count a step on the workers: it is of another model."""

    def stepped_here(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer whose parameters are in this process."""
        if self.ended is None or self._optimizer() is not optimizer:
            return
        self._stepped_at.append(time.perf_counter())
        if len(self._stepped_at) < _SKIPPED + _COUNTED:
            return
        between = [after - before for before, after in zip(self._stepped_at, self._stepped_at[1:])]
        here_s = statistics.median(between[_SKIPPED - 1 :])
        times = StepTimes(self._models, here_s, self._on_workers_s, self._num_workers)
        ended, self.ended = self.ended, None
        logger.say(times.line())
        self._keep(times)
        ended(times)

    def _keep(self, times: StepTimes) -> None:
        date = datetime.now(timezone.utc).date().isoformat()
        entry = {
            "here_s": float(f"{times.here:.4g}"),
            "on_workers_s": float(f"{times.on_workers:.4g}"),
            "models": times.models,
            "date": date,
        }
        with contextlib.suppress(OSError):  # the folder cannot be written: they are tried anew in the next run
            for key in self._keys:
                FILE.keep(key, entry)
