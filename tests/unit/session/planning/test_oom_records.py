"""What a machine remembers of plans that ran out of memory."""

import json

import pytest
import torch
import torch.distributed as dist

from moreh_ap.planner.search.planning_task import Corrections
from moreh_ap.session.planning import oom_records
from moreh_ap.session.planning.step_watch import Expected
from unit.session.planning.samples import GIB, candidate


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"), True),
        (dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77\nLast error:\nCuda failure 2 'out of memory'"), True),
        (dist.DistBackendError("Last error:\nCuda failure 'out of memory'"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (dist.DistBackendError("NCCL error in: NCCLUtils.cpp:77\nncclSystemError: Connection refused"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx`"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_out_of_memory_is_recognised(error, expected):
    assert oom_records.is_out_of_memory(error) is expected


def test_a_plan_that_ran_out_limits_later_plans_of_the_same_model_and_batch(monkeypatch, tmp_path):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    expected = Expected("here", "Model", 8, candidate("replicate=2", 20.0), Corrections(memory=2.0))
    oom_records.remember(expected, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"))
    limit = 2 * GIB + 0.9 * 20 * GIB
    assert oom_records.limit_of("here", "Model", 8, factor=2.0) == limit
    assert oom_records.limit_of("here", "Model", 16, factor=1.0) == limit / 2
    assert oom_records.limit_of("here", "Model", 7, factor=1.0) == float("inf")
    assert oom_records.limit_of("here", "Another", 8, factor=1.0) == float("inf")
    entry = json.loads((tmp_path / "ran_out.json").read_text())["here"]["runs"][0]
    assert entry["message"] == "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize("runs", ["none", [{}], [3], [{"model": "Model", "batch": 1, "limit_bytes": "much"}]])
def test_a_broken_entry_limits_nothing(monkeypatch, tmp_path, runs):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    (tmp_path / "ran_out.json").write_text(json.dumps({"here": {"runs": runs}}))
    assert oom_records.limit_of("here", "Model", 8, factor=1.0) == float("inf")
