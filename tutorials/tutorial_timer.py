"""Measures phases of a training step, and the memory that a run takes.

Decides what a phase's time is. Knows nothing of what is done in it.
"""

from __future__ import annotations

import time

import torch


class PhaseTimer:
    """A context manager that measures how long its body takes, devices included.

    Devices work on their own: without waiting for them, a phase would show the time it took to ask for its work.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets what was measured."""
        self._total_s, self._count = 0.0, 0

    @property
    def mean_ms(self) -> float:
        """Milliseconds of a phase, the mean since `reset`; 0 before the first."""
        return 1000 * self._total_s / self._count if self._count else 0.0

    def __enter__(self) -> None:
        _wait_for_devices()
        self._start_s = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            _wait_for_devices()
            self._total_s += time.perf_counter() - self._start_s
            self._count += 1


def memory_stats() -> dict[str, float]:
    """Returns allocated, reserved and peak memory of the device in GiB; nothing without a device."""
    if not torch.cuda.is_available():
        return {}
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    return {
        "memory/total_gib": total_bytes / 2**30,
        "memory/allocated_gib": torch.cuda.memory_allocated() / 2**30,
        "memory/reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "memory/peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def _wait_for_devices() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
