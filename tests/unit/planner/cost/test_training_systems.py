"""What steps in pieces cost in each training program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.planner.cost.training_systems import MOREH_AP
from unit.planner.cost.samples import SYSTEM, TINY, step


@pytest.mark.parametrize(
    "plan", ["pipeline=2,micro_batches=2", "replicate=1,micro_batches=2", "tensor=2,micro_batches=4"]
)
def test_steps_in_pieces_follow_the_forward_once_without_values(plan):
    operations = 8 * TINY.block.num_kernels + TINY.first.num_kernels + TINY.last.num_kernels
    without = step(plan, system=replace(SYSTEM, host_s_per_dry_run_op=0.0))
    assert step(plan).total_s - without.total_s == pytest.approx(2e-4 * operations)
    whole = plan.replace("micro_batches=2", "micro_batches=1").replace("micro_batches=4", "micro_batches=1")
    if "pipeline" not in plan:
        assert step(whole).total_s == step(whole, system=replace(SYSTEM, host_s_per_dry_run_op=0.0)).total_s


def test_a_plan_for_gpus_says_nothing_of_hosts_that_were_not_measured():
    assert (MOREH_AP.host_s_per_dry_run_op, MOREH_AP.host_computes) == (0.0, False)
