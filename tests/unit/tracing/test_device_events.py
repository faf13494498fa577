"""What of the profiler's events is in a trace, and how it is called."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.tracing import device_events
from moreh_ap.tracing.device_events import DeviceEvents, _kind
from moreh_ap.tracing.spans import now_ns, this_clock

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@pytest.mark.parametrize(
    ("name", "is_kernel", "kind"),
    [
        ("gloo:all_reduce", False, ("collectives", "collective", "all_reduce")),
        ("nccl:all_gather", False, ("collectives", "collective", "all_gather")),
        ("nccl:all_gather", True, None),  # the same once more, as a range on the device
        (NCCL, True, ("collectives on the GPU", "collective", "AllReduce")),
        ("void gemm", True, ("kernels", "device", "void gemm")),
        ("cudaStreamSynchronize", False, ("waits for the GPU", "wait", "waiting for the GPU")),
        ("aten::mm", False, None),
    ],
)
def test_kinds(name, is_kernel, kind):
    assert _kind(name, is_kernel=is_kernel) == kind


def test_names_around_kernels_are_left_out(monkeypatch):
    """As the ranges of FSDP2, which a profiler repeats on the device."""

    def event(name, is_user_annotation):
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: torch.autograd.DeviceType.CUDA,
            is_user_annotation=lambda: is_user_annotation,
            device_resource_id=lambda: 7,
            start_ns=lambda: 10,
            duration_ns=lambda: 5,
        )

    results = SimpleNamespace(events=lambda: [event("FSDP::all_gather (0)", True), event("void gemm", False)])
    profile = SimpleNamespace(start=int, stop=int, profiler=SimpleNamespace(kineto_results=results))
    monkeypatch.setattr(device_events, "profile", lambda activities: profile)
    (span,) = DeviceEvents(is_cuda=True).stop(this_clock())
    assert (span.name, span.lane) == ("void gemm", "kernels of stream 7")


def test_a_collective_of_a_worker_s_thread_is_on_its_clock(tmp_path, capfd):
    spans = []

    def work():
        began_ns = now_ns()
        recorded = DeviceEvents(is_cuda=False)
        torch.distributed.all_reduce(torch.ones(4))
        spans.append((began_ns, recorded.stop(this_clock()), now_ns()))

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        torch.distributed.destroy_process_group()
    ((began_ns, (span,), ended_ns),) = spans
    assert (span.name, span.lane) == ("all_reduce", "collectives")
    assert began_ns < span.began_ns <= span.ended_ns < ended_ns
    assert capfd.readouterr().err == ""
