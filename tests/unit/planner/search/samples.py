"""A small model, one of a billion parameters, and searches for them."""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.choice import Choice, choose_plan
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


BILLION = TransformerShape(24, 2048, 8192, 16, 16, 128, 32000, name="one billion")


def choose(
    text: str = "8xH100", batch: int = 64, forced: str = "", shape: TransformerShape = BILLION, **left: object
) -> Choice:
    task = Task(profile_of(shape, 1024), find_cluster(text), batch, Constraints(**left))  # type: ignore[arg-type]
    return choose_plan(task, Plan.parse(forced) if forced else None)
