"""Records what a device does during some steps, from inside of a model's forward: in a worker as in a script.

A file says when: while it exists, forwards are recorded; the first one after it has gone writes what was found
beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

RESULT = ".result"
_COMPILED = "Torch-Compiled Region"
"""How PyTorch calls what runs as it was compiled."""
_LONGEST_NAME = 100
"""How many letters of a kernel's name are kept."""


def idle_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Returns the part of the time between the first start and the last end in which nothing ran."""
    busy, end, first = 0.0, float("-inf"), None
    for start, stop in sorted(intervals):
        first = start if first is None else first
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 0.0 if first is None or end <= first else 1.0 - busy / (end - first)


def longest_kernels(kernels: Iterable[tuple[str, float, float]], most: int = 40) -> list[tuple[str, int, float]]:
    """Returns the kernels that took longest altogether: name, number of runs, ms.

    Args:
        kernels: Name, start and end in µs of each run.
        most: How many to return.
    """
    spans: dict[str, list[float]] = {}
    for name, start, stop in kernels:
        spans.setdefault(name, []).append(stop - start)
    found = [(name, len(each), sum(each) / 1e3) for name, each in spans.items()]
    return sorted(found, key=lambda one: -one[2])[:most]


def longest_gaps(kernels: Iterable[tuple[str, float, float]], most: int = 20) -> list[tuple[str, str, int, float]]:
    """Returns between which kernels nothing ran for longest altogether: names before and behind, gaps, ms.

    Args:
        kernels: Name, start and end in µs of each run.
        most: How many to return.
    """
    gaps: dict[tuple[str, str], list[float]] = {}
    before, end = "", float("inf")
    for name, start, stop in sorted(kernels, key=lambda one: one[1]):
        if start > end:
            gaps.setdefault((before, name), []).append(start - end)
        if not before or stop > end:
            before, end = name, stop
    found = [(*names, len(each), sum(each) / 1e3) for names, each in gaps.items()]
    return sorted(found, key=lambda one: -one[3])[:most]


class _Recorder:
    """The recording of this process."""

    def __init__(self) -> None:
        self.running: Any = None

    def look(self, flag: str) -> None:
        """Begins or ends a recording, as the file says."""
        wanted = os.path.exists(flag)
        if wanted and self.running is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.running = torch.profiler.profile(activities=activities)
            self.running.start()
        elif not wanted and self.running is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.running.stop()
            found, self.running = _summary(self.running.events()), None
            descriptor = os.open(flag + RESULT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.write(descriptor, json.dumps(found).encode())
            os.close(descriptor)


def _summary(events: Sequence[Any]) -> dict[str, Any]:
    on_device = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
    kernels = [event for event in on_device if not event.is_user_annotation]  # which last while nothing runs, as FSDP's
    counted = kernels or events
    spans = [(event.name[:_LONGEST_NAME], event.time_range.start, event.time_range.end) for event in counted]
    compiled = any(event.name.startswith(_COMPILED) for event in events)
    idle = idle_share((start, stop) for _, start, stop in spans)
    longest = {"kernels": longest_kernels(spans), "gaps": longest_gaps(spans)}
    return {"idle": idle, "kernels": float(len(kernels)), "compiled": compiled, "longest": longest}


RECORDER = _Recorder()


class Recorded(nn.Module):
    """A model whose forwards are recorded while a file exists.

    Args:
        model: What is called.
        flag: The file.
    """

    def __init__(self, model: nn.Module, flag: str) -> None:
        super().__init__()
        self.model, self.flag = model, flag

    def forward(self, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        RECORDER.look(self.flag)
        return self.model(**kwargs)
