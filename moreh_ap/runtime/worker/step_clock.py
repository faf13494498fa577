"""How long the training steps of this worker took.

Decides where a step begins and ends: at the first forward with gradients after the last step, and at the end of the
optimizer's step. What the script does before, such as reading data or evaluating, is not part of it. Only steps of one
backward are kept: a prediction is for one call of the model, and a script may add up the gradients of several.
"""

from __future__ import annotations

import time
from collections import deque

import torch

_KEPT = 8

Mark = float | torch.cuda.Event


class StepClock:
    """Measures steps without waiting for the device.

    Args:
        is_cuda: Whether to ask the device's queue for the time.
    """

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._steps: deque[tuple[Mark, Mark]] = deque(maxlen=_KEPT)
        self._began: Mark | None = None
        self._num_backwards = 0

    def restart(self) -> None:
        """Forget all steps: a new model was laid out."""
        self._steps.clear()
        self._began, self._num_backwards = None, 0

    def forward_begins(self) -> None:
        """A forward with gradients is about to run."""
        if self._began is None:
            self._began, self._num_backwards = self._mark(), 0

    def backward_begins(self) -> None:
        """A backward is about to run."""
        self._num_backwards += 1

    def step_ended(self) -> None:
        """An optimizer has been stepped."""
        if self._began is not None and self._num_backwards == 1:
            self._steps.append((self._began, self._mark()))
        self._began = None

    def seconds(self) -> tuple[float, ...]:
        """Returns the seconds of the last steps, the latest last. Waits for the device."""
        if self._is_cuda:
            torch.cuda.synchronize()
        return tuple(_between(began, ended) for began, ended in self._steps)

    def _mark(self) -> Mark:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Mark, ended: Mark) -> float:
    if isinstance(began, float) and isinstance(ended, float):
        return ended - began
    assert isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
    return began.elapsed_time(ended) / 1000
