"""One plan is evaluated whether it fits or not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Task
from unit.planner.search.samples import PROFILE, find, with_memory


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
