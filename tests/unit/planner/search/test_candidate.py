"""One plan is evaluated whether it fits or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task

SHAPE = TransformerShape(8, 1024, 4096, 16, 4, 64, 32000, name="small")
PROFILE = profile_of(SHAPE, 1024)
LIKE_ONE_LINE = {"memory_usage_correction_ratio": 80}


def with_memory(cluster, gib):
    return replace(cluster, device=replace(cluster.device, memory_bytes=gib * 2**30))


def find(cluster, batch, profile=PROFILE, **settings):
    cluster = find_cluster(cluster) if isinstance(cluster, str) else cluster
    return search(Task(profile, cluster, batch, Constraints(**{**LIKE_ONE_LINE, **settings})))


def test_one_plan_can_be_weighed():
    task = Task(PROFILE, with_memory(find_cluster("4xA100"), 2.0), 16)
    candidate = evaluate_plan(task, Plan(replicate=4, precision="bf16"))
    assert not candidate.fits and candidate.rejected and candidate.step.total_s > 0
    with pytest.raises(PlanError, match="there are 4"):
        evaluate_plan(task, Plan(shard=8))
    with pytest.raises(PlanError, match="too few"):
        evaluate_plan(replace(task, cluster=find_cluster("16xA100")), Plan(pipeline=16))


def test_parts_add_up():
    best = find("8xH100", 64).best
    parts = best.memory.components
    assert sum(num_bytes for _, num_bytes in parts) == pytest.approx(best.memory.reserved_bytes)
    assert sum(seconds for _, seconds, _ in best.step.components) == pytest.approx(best.step.total_s)
