"""The blocks of every position along a pipeline."""

from __future__ import annotations

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.stage_positions import positions_of
from moreh_ap.planner.cost.training_systems import EAGER_MEGATRON, MOREH_AP
from unit.planner.cost.samples import SMALL_PROFILE


@pytest.mark.parametrize("system", [MOREH_AP, EAGER_MEGATRON])
@pytest.mark.parametrize(
    "plan", [Plan(pipeline=3), Plan(pipeline=8, micro_batches=8), Plan(pipeline=4, layers=(1, 3, 3, 1)), Plan()]
)
def test_all_blocks_are_somewhere(plan, system):
    found = positions_of(SMALL_PROFILE, plan, system)
    assert sum(stage.blocks * stage.count for stage in found) == 8
    assert sum(stage.count for stage in found) == plan.pipeline
    assert [stage.has_first for stage in found].count(True) == 1
    assert [stage.has_last for stage in found].count(True) == 1


@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_even_stages_are_those_of_the_plan(pipeline):
    plan = Plan(pipeline=pipeline, micro_batches=8)
    blocks = [stage.blocks for stage in positions_of(SMALL_PROFILE, plan, MOREH_AP) for _ in range(stage.count)]
    assert blocks == [len(stage) for stage in plan.stage_ranges(8)]
