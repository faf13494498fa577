"""What the bench for GPUs makes of what its runs measured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import bench_gpu  # noqa: E402
from bench_gpu_profiler import _summary, idle_share, longest_gaps, longest_kernels  # noqa: E402
from bench_gpu_ways import SIZES, flops_per_token  # noqa: E402


def measured(way, step_s, device="NVIDIA H100 80GB HBM3"):
    figures = {"step_s": step_s, "tokens_per_s": 8192 / step_s, "flops_per_s": 1e14 / step_s}
    return {"way": way, "device": device, **figures, "peak_reserved_bytes": 2**34, "idle": 0.1, "start_s": 9.0,
            "losses": [2.0, 1.5], "compiled": step_s < 0.3}  # fmt: skip


def test_idle_is_what_no_kernel_covers():
    assert idle_share([(0, 4), (2, 3), (6, 10)]) == pytest.approx(0.2)
    assert idle_share([(3, 5)]) == 0.0 and idle_share([]) == 0.0


def test_names_around_kernels_are_no_kernels():
    def event(start, end, device, is_user_annotation=False, name="kernel"):
        time_range = SimpleNamespace(start=start, end=end)
        return SimpleNamespace(
            time_range=time_range, device_type=device, is_user_annotation=is_user_annotation, name=name
        )

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [event(0, 4, cuda), event(6, 10, cuda), event(0, 10, cuda, True), event(0, 10, cpu)]
    longest = {"kernels": [("kernel", 2, 8e-3)], "gaps": [("kernel", "kernel", 1, 2e-3)]}
    assert _summary(events) == {"idle": pytest.approx(0.2), "kernels": 2.0, "compiled": False, "longest": longest}
    assert _summary([*events, event(0, 10, cpu, name="Torch-Compiled Region: 0/0")])["compiled"]


def test_the_longest_kernels_and_gaps():
    runs = [("b", 10, 12), ("a", 0, 4), ("b", 3, 6), ("c", 20, 29), ("b", 30, 31)]
    assert longest_kernels(runs) == [("c", 1, 9e-3), ("b", 3, 6e-3), ("a", 1, 4e-3)]
    assert longest_gaps(runs) == [("b", "c", 1, 8e-3), ("b", "b", 1, 4e-3), ("c", "b", 1, 1e-3)]
    assert longest_kernels(runs, 1) == [("c", 1, 9e-3)] and longest_gaps(runs, 0) == [] == longest_gaps([])


def test_operations_of_a_token():
    assert flops_per_token(100, 10, 2, 3, 5) == 6 * 90 + 12 * 2 * 3 * 5


def test_ways_take_turns():
    assert bench_gpu.order(["a", "b", "c"], 0) == ["a", "b", "c"] and bench_gpu.order(["a", "b", "c"], 1)[0] == "c"


def test_the_table_has_medians_and_says_what_failed():
    runs = [measured("plain", 0.4), measured("plain", 0.2), measured("plain", 0.3), {"way": "fsdp", "error": "?"}]
    _, plain, failed = bench_gpu.table(runs)
    assert "300.0 ms" in plain and "16.0 GiB" in plain and "10.0%" in plain and "1.500" in plain
    assert plain.endswith("as written or compiled")
    assert bench_gpu.table([measured("line", 0.2)])[1].endswith("  compiled")
    assert f"{100 * 1e14 / 0.3 / 989e12:.1f}%" in plain and failed.split() == ["fsdp", "failed"]
    assert bench_gpu.mfu(measured("plain", 0.3, "CPU")) is None


def test_the_aim_is_named_where_both_were_measured():
    assert "1.50 times" in bench_gpu.verdict("8b", [measured("line", 0.3), measured("fsdp", 0.2)])
    assert bench_gpu.verdict("8b", [measured("line", 0.3)]) == "" and set(bench_gpu.AIMS) | {"toy"} == set(SIZES)
