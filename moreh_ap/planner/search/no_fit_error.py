"""The error where no plan fits: bytes needed and available, and what would fit.

Decides what the error proposes: a smaller batch, more devices or the next flavour, or another value of an option that
keeps the model from fitting. Must not know how a plan is searched for beyond asking for the leanest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from moreh_ap.errors import PlanError
from moreh_ap.flavours import flavour_of
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.search_space import enumerate_axes, recompute_kinds

__all__ = ["fewest_devices", "nothing_fits"]

_MOST_DEVICES = 4096


def nothing_fits(task: Task, candidates: Sequence[Candidate]) -> PlanError:
    """Returns the error that names bytes needed and available, and what would fit."""
    on_devices = [one for one in candidates if one.plan.offload != "all"] or candidates  # of all, host memory is short
    least = min(on_devices, key=lambda candidate: candidate.memory.reserved_bytes)
    remedies = list(_options(task))
    rows = _largest_batch(task)
    if rows:
        remedies.append(f"a batch of {rows} rows (it has {task.global_batch})")
    devices = fewest_devices(task)
    if devices:
        flavour = flavour_of(devices, task.cluster.device.memory_bytes)
        named = f", flavour {flavour}" if flavour else ""
        remedies.append(f"{devices} devices{named} (there are {task.cluster.num_devices})")
    return PlanError(
        f"out of memory: the leanest plan {str(least.plan)!r} needs {_gib(least.memory.reserved_bytes)} GiB "
        f"on a device, {_gib(task.usable_bytes)} GiB are available to it",
        " or ".join(remedies) or "a smaller model, shorter rows or devices with more memory",
        f"torch.moreh.option.enable_advanced_parallelization(devices={devices})" if devices else "",
    )


def _options(task: Task) -> Iterator[str]:
    """Yields the options that keep the model from fitting, with their values."""
    constraints = task.constraints
    changes: dict[str, Any] = {
        "distribute_parameter": "auto",
        "activation_recomputation": "auto",
        "num_micro_batches": "auto",
        "num_stages": "auto",
        "pipeline_parallel": True,
    }
    for name, free in changes.items():
        given = getattr(constraints, name)
        if given == free or given is True:
            continue
        freed = replace(task, constraints=replace(constraints, **{name: free}))
        if _least_bytes(freed) <= task.usable_bytes:
            yield f"{name}={free!r} (it is {given})"


def _largest_batch(task: Task) -> int:
    """Returns the largest batch that fits, in rows, below the present one; 0 if not even one row fits."""
    low, high = 0, task.global_batch - 1
    while low < high:
        middle = (low + high + 1) // 2
        fits = _least_bytes(replace(task, global_batch=middle)) <= task.usable_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def fewest_devices(task: Task) -> int:
    """Returns the smallest number of devices, doubled from the present, that fits; 0 if none does."""
    devices = task.cluster.num_devices * 2
    while devices <= _MOST_DEVICES:
        cluster = replace(task.cluster, num_devices=devices)
        if _least_bytes(replace(task, cluster=cluster)) <= task.usable_bytes:
            return devices
        devices *= 2
    return 0


def _least_bytes(task: Task) -> float:
    """Returns what the leanest of all plans reserves on its fullest device, infinite if there is none."""
    memories = ((plan, task.memory_of(plan)) for plan in _lean_plans(task))
    return min((one.reserved_bytes for plan, one in memories if _host_has(task, plan, one)), default=float("inf"))


def _host_has(task: Task, plan: Plan, memory: MemoryEstimate) -> bool:
    return plan.offload != "all" or memory.host_bytes <= task.usable_host_bytes


def _lean_plans(task: Task) -> Iterator[Plan]:
    """Yields, for each assignment of devices to axes, the plan that keeps least: it recomputes, one row at a time."""
    constraints = task.constraints
    num_devices, per_node = task.cluster.num_devices, task.cluster.devices_per_node
    for across_nodes in (False, True):
        for assignment in enumerate_axes(task.profile, num_devices, per_node, constraints, across_nodes=across_nodes):
            rows = -(-task.global_batch // (assignment.replicate * assignment.shard))
            count = rows if constraints.num_micro_batches == "auto" else constraints.num_micro_batches
            short = count < assignment.pipeline
            offloads = ["none"]
            if constraints.offload:
                offloads = ["optimizer"] + ["all"] * (assignment.tensor * assignment.pipeline == 1)
            lean = Plan(
                assignment.replicate,
                assignment.shard,
                tensor=assignment.tensor,
                sequence_parallel=assignment.sequence_parallel,
                pipeline=assignment.pipeline,
                micro_batches=count,
                schedule="gpipe" if short and assignment.pipeline > 1 else "1f1b",
                recompute=recompute_kinds(task.profile.num_blocks, constraints)[-1],
                precision=task.precision,
            )
            yield from (replace(lean, offload=offload) for offload in offloads)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
