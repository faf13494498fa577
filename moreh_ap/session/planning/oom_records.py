"""Plans that ran out of memory on this machine: recognised, remembered, and held against later predictions.

Decides how much the plans of a model may need after one of them did not fit. Must not know what is done instead.
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
"""How much of what a plan that ran out was predicted to allocate the next one may need. Each try costs a start of the
workers, so plans that save next to nothing are passed over. A choice of ours."""
_KEPT_RUNS = 50
_CPU_ALLOCATOR = "can't allocate memory"
"""What PyTorch's allocator of host memory says, in a plain RuntimeError. Source: c10/core/impl/alloc_cpu.cpp."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of a worker says that its device has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) is RuntimeError and _CPU_ALLOCATOR in str(error)


def limit_after(candidate: Candidate) -> float:
    """Returns how many bytes may be predicted for plans of a model of which this one ran out of memory."""
    return candidate.memory.fragmentation_bytes + _LEAN * candidate.memory.allocated_bytes


def remember(expected: Expected, error: BaseException) -> None:
    """Notes that a model ran out of memory under a plan."""
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
    with contextlib.suppress(OSError):  # where the folder cannot be written, nothing is learned
        FILE.keep(expected.machine, {"runs": [*_runs(expected.machine), run][-_KEPT_RUNS:]})


def limit_of(machine: str, model: str, batch: int, factor: float) -> float:
    """Returns how many bytes may be predicted for plans of a model; infinite if none ran out with such a batch.

    Args:
        machine: Under which name the machine's runs are remembered.
        model: Name of the model.
        batch: Rows of a step; a larger batch that ran out says nothing of a smaller one.
        factor: What the predictions to compare with contain of earlier runs.
    """
    limits = [float("inf")]
    for run in _runs(machine):
        with contextlib.suppress(KeyError, TypeError, ValueError):  # an entry of somebody else
            if run["model"] == model and run["batch"] <= batch:
                limits.append(float(run["limit_bytes"]) * factor)
    return min(limits)


def first_line(error: BaseException) -> str:
    """Returns what PyTorch says happened, without its advice about the allocator."""
    return re.split(r"(?<=iB\.) ", str(error).strip().partition("\n")[0])[0]


def _runs(machine: str) -> list[dict[str, Any]]:
    runs = (FILE.look_up(machine) or {}).get("runs", [])
    return runs if isinstance(runs, list) else []
