"""Finds the fastest plan that fits: looks through the space, memory first, time only of what fits.

Decides which plans become candidates. Must not know processes or torch, how bytes and seconds are estimated, or which
plan is preferred: that is `ranking.py`.

[Note: recomputation]
For the same axes, order and micro-batches, what recomputes more is slower and keeps less. If the plan that recomputes
nothing fits, it is the only one worth timing. If not, two are: the one that recomputes selectively, and the one that
recomputes the fewest whole blocks, found by halving. Without a pipeline, fewer micro-batches are never slower: once a
number of them fits without recomputing, larger ones are not looked at. If what keeps least of all does not fit, nothing
else of the same axes does.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking, rank
from moreh_ap.planner.search.search_space import (
    Axes,
    PipelineOrder,
    enumerate_axes,
    micro_batch_counts,
    pipeline_orders,
    recompute_kinds,
)

__all__ = ["search"]

_MORE_RECOMPUTED = "recomputes more than it needs to fit"
_MORE_PIECES = "has more micro-batches than it needs to fit, and no pipeline to fill"
_TOO_LARGE = "does not fit, because not even the plan with the least memory on the same axes fits"


def search(task: Task) -> Ranking:
    """Returns the plans for a task, best first; every plan uses all devices. See the notes of this module.

    Raises:
        PlanError: There is nothing to plan. Constraints always leave a plan: one that only replicates, or only shards.
    """
    started_s = time.perf_counter()
    cluster, global_batch = task.cluster, task.global_batch
    if cluster.num_devices < 1 or global_batch < 1 or cluster.device.memory_bytes <= 0:
        raise PlanError(
            f"nothing to plan: {cluster.num_devices} devices of {cluster.device.memory_bytes:.0f} bytes, "
            f"{global_batch} rows",
            "at least one device with memory and one row",
        )
    found: list[Candidate] = []
    skipped: Counter[str] = Counter()
    passes = [(False, "none"), (True, "none")]
    if task.constraints.offload:
        passes += [(False, "optimizer"), (True, "optimizer"), (False, "all")]
    for across_nodes, offload in passes:
        found += _look_through(task, across_nodes, offload, skipped)
        if any(candidate.fits for candidate in found):
            break
    prepared_s = time.perf_counter()
    ranked, num_fitting = rank(_timed(task, candidate) for candidate in found)
    return Ranking(
        task, ranked, num_fitting, dict(skipped), prepared_s - started_s, time.perf_counter() - prepared_s
    )  # fmt: skip


# -- looking through ---------------------------------------------------------------------------------------------------


def _look_through(task: Task, across_nodes: bool, offload: str, skipped: Counter[str]) -> Iterator[Candidate]:
    """Yields the candidates of one pass. See [Note: recomputation]."""
    cluster, constraints = task.cluster, task.constraints
    kinds = recompute_kinds(task.profile.num_blocks, constraints)
    for assignment in enumerate_axes(
        task.profile, cluster.num_devices, cluster.devices_per_node, constraints, across_nodes=across_nodes
    ):
        if offload == "all" and assignment.tensor * assignment.pipeline > 1:
            continue  # no such plan
        rows = -(-task.global_batch // (assignment.replicate * assignment.shard))
        choices = [
            (order, count)
            for order in pipeline_orders(task.profile, assignment.pipeline, constraints)
            for count in micro_batch_counts(rows, assignment.pipeline, order, constraints)
        ]
        if not choices:
            continue
        finest = dict(choices)
        leanest = min(
            (_candidate(task, assignment, order, count, kinds[-1], offload) for order, count in finest.items()),
            key=_bytes_of,
        )
        if not leanest.fits:
            skipped[_TOO_LARGE] += len(choices) * len(kinds) - 1
            yield leanest
            continue
        for place, (order, count) in enumerate(choices):
            found = _recomputing(task, assignment, order, count, kinds, offload, skipped)
            yield from found
            if assignment.pipeline == 1 and found[0].fits:
                skipped[_MORE_PIECES] += len(choices) - place - 1
                break


def _recomputing(
    task: Task,
    assignment: Axes,
    order: PipelineOrder,
    count: int,
    kinds: tuple[str, ...],
    offload: str,
    skipped: Counter[str],
) -> list[Candidate]:
    """Returns the plans that differ in recomputation alone, the cheapest first. See [Note: recomputation]."""
    found = [_candidate(task, assignment, order, count, kinds[0], offload)]
    if found[0].fits or len(kinds) == 1:
        skipped[_MORE_RECOMPUTED] += len(kinds) - 1
        return found
    found.append(_candidate(task, assignment, order, count, kinds[-1], offload))
    if not found[-1].fits:
        skipped[_TOO_LARGE] += len(kinds) - 2
        return found
    found += (_candidate(task, assignment, order, count, kind, offload) for kind in kinds[1:-1])
    if kinds[0] == "none":  # where every block has to recompute, there is nothing between
        most = -(-task.profile.num_blocks // (assignment.pipeline * order.stages_per_device))
        low, high = 0, max(order.layers, default=most)
        while high - low > 1:  # `high` blocks fit, `low` do not
            middle = (low + high) // 2
            found.append(_candidate(task, assignment, order, count, middle, offload))
            low, high = (low, middle) if found[-1].fits else (middle, high)
    fitting = [candidate for candidate in found[1:] if candidate.fits and candidate.plan.recompute != "selective"]
    slower = {id(candidate) for candidate in fitting} - {id(min(fitting, key=_blocks_recomputed))}
    skipped[_MORE_RECOMPUTED] += len(slower)
    return [candidate for candidate in found if id(candidate) not in slower]


def _blocks_recomputed(candidate: Candidate) -> float:
    level = candidate.plan.recompute
    return level if isinstance(level, int) else float("inf")


def _candidate(
    task: Task, assignment: Axes, order: PipelineOrder, count: int, level: str | int, offload: str
) -> Candidate:
    plan = Plan(
        assignment.replicate,
        assignment.shard,
        tensor=assignment.tensor,
        sequence_parallel=assignment.sequence_parallel,
        pipeline=assignment.pipeline,
        micro_batches=count,
        schedule=order.schedule,
        stages_per_device=order.stages_per_device,
        layers=order.layers,
        recompute=level,
        precision=task.precision,
        offload=offload,
    )
    plan = plan.with_compiled_blocks() if task.constraints.compiles_blocks else plan
    return Candidate(plan, task.memory_of(plan), task.usable_bytes, usable_host_bytes=task.usable_host_bytes)


def _timed(task: Task, candidate: Candidate) -> Candidate:
    if not candidate.fits:
        return candidate
    return replace(candidate, step=task.step_of(candidate.plan))


def _bytes_of(candidate: Candidate) -> float:
    return candidate.memory.reserved_bytes
