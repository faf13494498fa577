"""Where the steps of a model take less time: in the script's own process or on workers on CPUs. Tried once, remembered.

Decides which models are tried here, for how many steps, and which place wins. Must not know how a model changes places,
nor how it runs in either.

[Note: the faster place]
Workers on CPUs share the cores that one process would use alone, so that splitting a batch gains little, and messages
and collectives have to be paid for; a call that every worker computes whole costs as many times as there are workers.
No prediction tells the two places apart well enough: kernels of one thread and of several differ by more. So once the
steps on the workers have been timed (`step_watch.py`), the next few steps run here, exactly as they would there. The
slower place is left, and other runs of the same model with the same batch go to the faster one at once. GPUs are not
compared: no step on this process's cores is faster than on them, and a call that all of them compute takes as long as
on one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from moreh_ap import log
from moreh_ap.local.cache_files import CacheFile
from moreh_ap.session.session import Session

FILE = CacheFile("own_process.json")

MAX_BYTES = 2**28
"""Of parameters. Larger ones, and the optimizer's state, would take seconds to change places."""

_SKIPPED, _COUNTED = 2, 3
"""Steps: in the first, operations run one by one, and the next keeps what it starts from. Then the median counts."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step, from one step of the optimizer to the next.

    Attributes:
        here: In the script's own process.
        on_workers: On the workers.
        num_workers: Their number.
    """

    here: float
    on_workers: float
    num_workers: int

    @property
    def is_faster_here(self) -> bool:
        """Whether steps take less time in the script's own process."""
        return self.here < self.on_workers

    def line(self, name: str) -> str:
        """Returns the line for the log; `name` is the model's class."""
        return log.places_line(name, self.here, self.on_workers, self.num_workers, is_here=self.is_faster_here)


class FasterPlace:
    """Which models were timed in both places, and which is to be.

    Args:
        session: Its workers are the other place, and its options say whether models may leave them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._due: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()

    def known_times(self, root: nn.Module, call: Any) -> StepTimes | None:
        """Returns what was measured of a model in this or an earlier run; None if nothing was.

        Args:
            root: The model.
            call: Positional and keyword arguments of a call of it.
        """
        if not self._may_be_here():
            return None
        entry = FILE.look_up(self._key(root, call)) or {}
        times = entry.get("here_s"), entry.get("on_workers_s")
        if not all(type(one) is float and one > 0 for one in times):
            return None
        return StepTimes(*times, self._session.num_devices)  # type: ignore[arg-type]

    def measured_on_workers(self, root: nn.Module, step_s: float) -> None:
        """Has the next call of a model ask whether it is tried here; `step_s` are the seconds of a step on workers."""
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in root.parameters())
        if self._may_be_here() and num_bytes <= MAX_BYTES:
            self._due[root] = step_s

    def take_due(self, root: nn.Module, call: Any) -> StepTrial | None:
        """Returns the trial of a model that starts with this call; None if it goes on on the workers."""
        step_s = self._due.pop(root, None)
        if step_s is None or self.known_times(root, call) is not None:
            return None
        return StepTrial(type(root).__name__, self._key(root, call), step_s, self._session.num_devices)

    def _may_be_here(self) -> bool:
        options = self._session.options
        return self._session.device_type == "cpu" and options.leaves_layout_open and not options.asks_for_devices

    def _key(self, root: nn.Module, call: Any) -> str:
        with torch._C.DisableTorchFunction():
            size = sum(parameter.numel() for parameter in root.parameters())
            tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        shape = tuple(tensors[0].shape) if tensors else ()
        cores = os.cpu_count()
        return f"{type(root).__name__}, {size} parameters, {shape}, {self._session.num_devices} workers, {cores} cores"


class StepTrial:
    """Times a model's steps in the script's own process.

    Args:
        name: The model's class.
        key: Under which the result is kept.
        on_workers_s: Seconds of a step on the workers.
        num_workers: Their number.
    """

    def __init__(self, name: str, key: str, on_workers_s: float, num_workers: int) -> None:
        self._name, self._key, self._on_workers_s, self._num_workers = name, key, on_workers_s, num_workers
        self._stepped_at: list[float] = []
        self._optimizer: weakref.ref[Optimizer] | None = None
        self.ended: Callable[[StepTimes], object] | None = None
        """Called once with the result."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Does not count a step on the workers: it is of another model."""

    def stepped_here(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer whose parameters are in this process."""
        if self._optimizer is None:
            self._optimizer = weakref.ref(optimizer)
        if self.ended is None or self._optimizer() is not optimizer:
            return
        self._stepped_at.append(time.perf_counter())
        if len(self._stepped_at) < _SKIPPED + _COUNTED:
            return
        between = [after - before for before, after in zip(self._stepped_at, self._stepped_at[1:])]
        here_s = statistics.median(between[_SKIPPED - 1 :])
        times = StepTimes(here_s, self._on_workers_s, self._num_workers)
        ended, self.ended = self.ended, None
        print(times.line(self._name), flush=True)
        self._keep(times)
        ended(times)

    def _keep(self, times: StepTimes) -> None:
        date = datetime.now(timezone.utc).date().isoformat()
        entry = {"here_s": float(f"{times.here:.4g}"), "on_workers_s": float(f"{times.on_workers:.4g}"), "date": date}
        with contextlib.suppress(OSError):  # the folder cannot be written: it is tried anew in the next run
            FILE.keep(self._key, entry)
