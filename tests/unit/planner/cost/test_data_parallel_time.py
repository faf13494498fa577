"""The exchanges of devices that share the batch."""

from __future__ import annotations

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

SHAPE = TransformerShape(32, 4096, 14336, 32, 8, 128, 128256, name="8B")
PROFILE = profile_of(SHAPE, 4096)
CLUSTER = find_cluster("64xH100")


def estimate(plan, rows=512, cluster=CLUSTER, system=MOREH_AP):
    return estimate_step(PROFILE, plan, rows, cluster, system)


def test_gathering_sharded_weights_takes_longer_for_more_micro_batches():
    few, many = (estimate(Plan(1, 64, micro_batches=count, precision="bf16")) for count in (1, 8))
    assert many.data_s + many.data_hidden_s > 4 * (few.data_s + few.data_hidden_s)
