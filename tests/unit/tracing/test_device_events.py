"""What of the profiler's events is in a trace, and how it is called."""

from __future__ import annotations

import threading

import pytest
import torch

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
