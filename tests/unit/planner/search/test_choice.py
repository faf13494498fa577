"""The plan that a session uses: the best of the search, or the forced one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.choice import Choice, choose_plan
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.planning_task import Task

SHAPE = TransformerShape(24, 2048, 8192, 16, 16, 128, 32000, name="one billion")


def choose(
    text: str = "8xH100", batch: int = 64, forced: str = "", shape: TransformerShape = SHAPE, **left: object
) -> Choice:
    task = Task(profile_of(shape, 1024), find_cluster(text), batch, Constraints(**left))  # type: ignore[arg-type]
    return choose_plan(task, Plan.parse(forced) if forced else None)


def test_the_best_of_the_search_is_chosen():
    choice = choose()
    assert choice.chosen is choice.candidates[0]
    assert choice.chosen.fits
    assert "plans fit in" in log.reason(choice) and "a step" in log.reason(choice)


EVERY_KIND = [
    "tensor=2,sequence_parallel=true,pipeline=2,schedule=zero_bubble",
    "pipeline=4,micro_batches=8,schedule=gpipe,recompute=full",
    "pipeline=2,schedule=interleaved,layers=5+7+7+5,replicate=2",
    "shard=2,tensor=2,recompute=3,offload=optimizer",
]


@pytest.mark.parametrize("text", EVERY_KIND)
def test_every_kind_of_plan_may_be_forced(text):
    choice = choose("4xH100", batch=8, forced=text)
    assert (str(choice.plan), len(choice.candidates)) == (str(Plan.parse(text)), 1)
    assert log.reason(choice).startswith("it was asked for") and "does not fit" not in log.reason(choice)
    assert log.search_lines(choice)[-1] == f"[info] {choice.plan.platform_line(8)}"


def test_a_forced_plan_that_does_not_fit_is_taken_and_said_so():
    choice = choose("4xL4", forced="replicate=4", shape=replace(SHAPE, num_layers=96))
    assert choice.plan == Plan(4)
    assert "by our estimate it does not fit" in log.reason(choice)


def test_a_forced_plan_for_other_devices_is_refused():
    with pytest.raises(PlanError, match="needs 4 devices, the accelerator has 2"):
        choose("2xH100", forced="shard=4")


def test_unverified_kinds_only_where_nothing_fits_without():
    unverified = {"kinds": frozenset(), "distribute_parameter": False, "offload": False}
    assert choose("2xH100", **unverified).plan.pipeline == choose("2xH100", **unverified).plan.tensor == 1
    large = replace(SHAPE, num_layers=96)
    chosen = choose("2xA100-80GB", shape=large, **unverified).plan
    assert chosen.tensor * chosen.pipeline == 2
    with pytest.raises(PlanError, match="out of memory"):
        choose("2xL4", shape=large, **unverified)
