"""Plans that ran out of memory on this machine: recognised, saved, and used to limit later predictions.

Decides how much memory the plans of a model may need after one of them did not fit. Must not know what follows.
"""

from __future__ import annotations

import contextlib
import re
from datetime import datetime, timezone
from typing import Any

import torch

from moreh_ap.local.cache_files import CacheFile
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.session.planning.step_watch import Expected

FILE = CacheFile("ran_out.json")

_LEAN = 0.9
"""Limit for the next plan, as a fraction of the predicted memory of a plan that ran out. Each try costs a start of the
workers, so plans that save almost nothing are skipped. A choice of ours."""
_KEPT_RUNS = 50
_MESSAGES = re.compile(
    r"can't allocate memory"
    r"|CUDA error: out of memory|CUDA driver error: out of memory|Cuda failure (2 )?'out of memory'"
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(ALLOC_FAILED|INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)"
)
"""What PyTorch says, in errors of other classes than its own, where memory was asked for past its allocator: by itself
on the host, by the driver, by NCCL, and by the libraries that bring buffers of their own.

Source: c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDAException.h, aten/src/ATen/cuda/Exceptions.cpp, NCCL's
src/include/checks.h and the libraries' tables of errors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of a worker means that its device ran out of memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _MESSAGES.search(str(error)) is not None


def limit_after(candidate: Candidate) -> float:
    """Returns the limit of predicted bytes for the model's other plans, after this plan ran out of memory."""
    return candidate.memory.fragmentation_bytes + _LEAN * candidate.memory.allocated_bytes


def remember(expected: Expected, error: BaseException) -> None:
    """Records that a model ran out of memory under a plan."""
    chosen, factor = expected.chosen, expected.corrections.memory
    run = {
        "model": expected.model,
        "plan": str(chosen.plan),
        "batch": expected.batch,
        "limit_bytes": round(limit_after(chosen) / factor),
        "predicted_bytes": round(chosen.memory.reserved_bytes / factor),
        "message": first_line(error),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    with contextlib.suppress(OSError):  # the folder cannot be written: the record is lost
        FILE.keep(expected.machine, {"runs": [*_runs(expected.machine), run][-_KEPT_RUNS:]})


def limit_of(machine: str, model: str, batch: int, factor: float) -> float:
    """Returns the limit of predicted bytes for plans of a model; infinite if no plan ran out with such a batch.

    Args:
        machine: The name under which the machine's runs are saved.
        model: Name of the model.
        batch: Rows of a step; a record of a larger batch does not limit a smaller one.
        factor: The correction from earlier runs that is in the predictions to compare with.
    """
    limits = [float("inf")]
    for run in _runs(machine):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # an entry of another format
            if run["model"] == model and run["batch"] <= batch:
                limits.append(float(run["limit_bytes"]) * factor)
    return min(limits)


def first_line(error: BaseException) -> str:
    """Returns PyTorch's message without its advice about the allocator."""
    return re.split(r"(?<=iB\.) ", str(error).strip().partition("\n")[0])[0]


def _runs(machine: str) -> list[dict[str, Any]]:
    runs = (FILE.look_up(machine) or {}).get("runs", [])
    return runs if isinstance(runs, list) else []
