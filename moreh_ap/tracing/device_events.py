"""Collectives and kernels of this process, as PyTorch's profiler sees them.

Decides which of its events are of interest in a trace of steps, and what they are called. Must not know when a step
begins.
"""

from __future__ import annotations

import os

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from moreh_ap.native_output import without_lines
from moreh_ap.tracing.spans import Clock, Span, on_lanes

_BACKENDS = ("gloo:", "nccl:")
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_COMPLAINT = "ERROR: External init callback"
"""What the profiler prints where it is first used by another thread than the main one, and then works all the same."""

_SILENT = "99"
"""A level above that of every line in the profiler's own log."""

_NCCL_KERNEL = "ncclDevKernel_"


class DeviceEvents:
    """Records from its making until `stop`, in the thread that makes it and in those of autograd.

    Args:
        is_cuda: Whether to ask the device for its kernels too.
    """

    def __init__(self, is_cuda: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        self._profile = profile(activities=activities)
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
        with without_lines(_COMPLAINT):
            self._profile.start()

    def stop(self, clock: Clock) -> list[Span]:
        """Returns the spans of collectives and, on GPUs, of kernels and of waits for them, each kind on its own lanes.

        Args:
            clock: That of this process: the profiler's times are those of the wall clock.
        """
        self._profile.stop()
        found: dict[str, list[Span]] = {}
        results = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        for event in results.events():  # type: ignore[union-attr]
            is_on_device = event.device_type() is DeviceType.CUDA
            kind = _kind(event.name(), is_kernel=is_on_device)
            if kind is None or (is_on_device and event.is_user_annotation()):  # a name around kernels, as FSDP's
                continue
            lane, category, name = kind
            if lane == "kernels":
                lane = f"kernels of stream {event.device_resource_id()}"
            began_ns = event.start_ns() - clock.wall_ahead_ns
            found.setdefault(lane, []).append(
                Span(name, category, began_ns, began_ns + event.duration_ns(), lane, {"event": event.name()})
            )
        return [span for lane, spans in found.items() for span in on_lanes(spans, lane)]


def _kind(name: str, *, is_kernel: bool) -> tuple[str, str, str] | None:
    """Returns lane, category and readable name of an event; None if the trace leaves it out."""
    if is_kernel:
        if name.startswith(_NCCL_KERNEL):
            return "collectives on the GPU", "collective", name.removeprefix(_NCCL_KERNEL).partition("_")[0]
        return None if name.startswith(_BACKENDS) else ("kernels", "device", name)
    for backend in _BACKENDS:
        if name.startswith(backend):
            return "collectives", "collective", name.removeprefix(backend)
    return ("waits for the GPU", "wait", "waiting for the GPU") if name in _WAITS else None
