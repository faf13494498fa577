"""Asks the planner for one cell of a page: a model on devices with a batch, trained in full or with adapters.

Knows what a question of the site leaves open: as the one line's defaults say, a plan may fill 80 per cent of a device.
Must not know which cells a page has, nor how it shows an answer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from moreh_ap.errors import PlanError
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.adapters import FROZEN_WEIGHTS, adapters_of, with_adapters
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.search_space import tensor_degrees_of

RATIO = 80


def task_for(model: str, devices: str, batch: int, length: int, rank: int | None = None) -> Task:
    """Returns what is asked of the planner for one cell.

    Args:
        model: Its name in the catalogue.
        devices: Such as "8xH100".
        batch: Rows of a step, over all devices.
        length: Tokens of a row.
        rank: That of adapters beside frozen weights in bfloat16, as `moreh-ap plan --lora` has them; None trains all.
    """
    shape, cluster = find_model(model).shape, find_cluster(devices)
    degrees = tensor_degrees_of(shape, cluster.num_devices)
    constraints = Constraints(memory_usage_correction_ratio=RATIO, tensor_degrees=degrees)
    profile = profile_of(shape, length)
    if rank is None:
        return Task(profile, cluster, batch, constraints)
    profile = with_adapters(profile, adapters_of(profile, shape, rank), FROZEN_WEIGHTS["bf16"])
    system = replace(MOREH_AP, trains_weights=False)
    return Task(profile, cluster, batch, replace(constraints, kinds=frozenset()), system)


@cache
def answer_for(
    model: str, devices: str, batch: int, length: int, rank: int | None = None
) -> tuple[Task, Candidate | None]:
    """Returns what is asked for one cell, and what the planner chooses; None if nothing fits."""
    task = task_for(model, devices, batch, length, rank)
    try:
        return task, search(task).best
    except PlanError:
        return task, None
