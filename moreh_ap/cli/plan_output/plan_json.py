"""Plans as `moreh-ap plan --json` prints them: dicts of numbers and text.

Decides the keys; units are in their names. Must not know how plans are found.
"""

from __future__ import annotations

from typing import Any

from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking


def plain_ranking(ranking: Ranking, top: int) -> dict[str, Any]:
    """Returns a search, with its first `top` candidates."""
    looked_at, fitting = ranking.counts
    outcome = {"looked_at": looked_at, "fitting": fitting, "left_out": ranking.skipped, "seconds": ranking.seconds}
    return {
        **plain_task(ranking.task),
        "search": outcome,
        "candidates": [plain_candidate(candidate) for candidate in ranking.candidates[:top]],
    }


def plain_task(task: Task) -> dict[str, Any]:
    """Returns the model, the devices and the batch that are planned for."""
    return {
        "model": task.profile.name,
        "parameters": task.profile.parameters,
        "device": task.cluster.device.name,
        "num_devices": task.cluster.num_devices,
        "devices_per_node": task.cluster.devices_per_node,
        "global_batch": task.global_batch,
        "sequence_length": task.profile.sequence_length,
        "usable_bytes": task.usable_bytes,
    }


def plain_candidate(candidate: Candidate) -> dict[str, Any]:
    """Returns a plan with its bytes, and with its seconds if it fits."""
    memory, step = candidate.memory, candidate.step
    plain: dict[str, Any] = {
        "plan": str(candidate.plan),
        "fits": candidate.fits,
        "rejected": candidate.rejected,
        "memory": {
            "allocated_bytes": memory.allocated_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "host_bytes": memory.host_bytes,
            "pipeline_position": memory.position,
            "parts_bytes": dict(memory.components),
        },
    }
    if step is not None:
        plain["step"] = {
            "total_s": step.total_s,
            "tokens_per_s": step.tokens_per_s,
            "tokens_per_s_per_device": step.tokens_per_s_per_device,
            "mfu": step.mfu,
            "parts_s": {label: seconds for label, seconds, _ in step.components},
            "hidden_s": {label: hidden for label, _, hidden in step.components if hidden},
        }
    return plain


def plain_fewer(fewer: Ranking) -> dict[str, Any]:
    """Returns the best plan on a smaller number of devices."""
    return {"num_devices": fewer.task.cluster.num_devices, **plain_candidate(fewer.best)}
