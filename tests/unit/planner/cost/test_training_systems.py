"""What steps in pieces cost in each training program."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.hardware import Cluster, Device, Link
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import MOREH_AP, MOREH_AP_ON_CPU
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

PROFILE = profile_of(TransformerShape(8, 256, 768, 8, 4, 32, 2000), 128)
DEVICE = Device("CPU", 2**32, 1e12, 1e11, 1e10, sustained=1.0)
RING = Link("ring", 1e9, 1e-4)
SYSTEM = replace(MOREH_AP_ON_CPU, host_s_per_kernel=1e-5, host_s_per_dry_run_op=2e-4)


def step(plan: str, between: Link = RING, device: Device = DEVICE, system=SYSTEM, rows: int = 16):
    found = Plan.parse(plan)
    cluster = Cluster(device, found.num_devices, found.num_devices, between, between)
    return estimate_step(PROFILE, found, rows, cluster, system, replace(COEFFICIENTS, step_s=0.0))


@pytest.mark.parametrize(
    "plan", ["pipeline=2,micro_batches=2", "replicate=1,micro_batches=2", "tensor=2,micro_batches=4"]
)
def test_steps_in_pieces_follow_the_forward_once_without_values(plan):
    operations = 8 * PROFILE.block.num_kernels + PROFILE.first.num_kernels + PROFILE.last.num_kernels
    without = step(plan, system=replace(SYSTEM, host_s_per_dry_run_op=0.0))
    assert step(plan).total_s - without.total_s == pytest.approx(2e-4 * operations)
    whole = plan.replace("micro_batches=2", "micro_batches=1").replace("micro_batches=4", "micro_batches=1")
    if "pipeline" not in plan:
        assert step(whole).total_s == step(whole, system=replace(SYSTEM, host_s_per_dry_run_op=0.0)).total_s


def test_a_plan_for_gpus_says_nothing_of_hosts_that_were_not_measured():
    assert (MOREH_AP.host_s_per_dry_run_op, MOREH_AP.host_computes) == (0.0, False)
