"""The seconds of a step, by what they go to."""

from __future__ import annotations

import sys
from dataclasses import fields, replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.cost.step_time import estimate_step
from moreh_ap.planner.cost.training_systems import EAGER_MEGATRON, TRAINING_SYSTEMS
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from unit.planner.cost.samples import CLUSTER, LARGE_PROFILE, estimate

HIDDEN = ("tensor_hidden_s", "data_hidden_s", "pipeline_hidden_s")
NOT_SECONDS = ("tokens", "num_devices", "model_flops", "peak_flops")


PLANS = [
    Plan(8, 8, precision="bf16"),
    Plan(64, precision="bf16", micro_batches=8),
    Plan(2, 8, tensor=4, precision="bf16", micro_batches=4),
    Plan(4, tensor=4, sequence_parallel=True, pipeline=4, micro_batches=16, precision="bf16"),
    Plan(tensor=2, pipeline=32, micro_batches=64, precision="bf16", recompute="full"),
    Plan(8, pipeline=8, micro_batches=16, schedule="interleaved", precision="bf16", recompute="selective"),
    Plan(8, pipeline=8, micro_batches=16, schedule="zero_bubble", recompute=2),
]


@pytest.mark.parametrize("system", TRAINING_SYSTEMS.values(), ids=lambda system: system.name)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_parts_add_up_and_no_plan_beats_the_hardware(plan, system):
    found = estimate(plan, system=system)
    parts = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in NOT_SECONDS}
    assert all(seconds >= 0.0 for seconds in parts.values()), parts
    assert found.total_s == pytest.approx(sum(seconds for name, seconds in parts.items() if name not in HIDDEN))
    assert 0.0 < found.mfu < CLUSTER.device.sustained
    assert found.tokens_per_s_per_device * found.num_devices == pytest.approx(512 * 4096 / found.total_s)


def test_one_device_computes_and_nothing_else():
    found = estimate(Plan(precision="bf16"), rows=8, cluster=find_cluster("1xH100"))
    assert found.tensor_s == found.data_s == found.pipeline_s == found.bubble_s == 0.0
    assert found.model_flops == 8 * LARGE_PROFILE.flops_per_row
    assert found.forward_s + found.backward_s > found.model_flops / (989.4e12 * CLUSTER.device.sustained)


def test_the_bubble_is_what_the_other_stages_take_for_one_micro_batch():
    few, many = (estimate(Plan(8, pipeline=8, micro_batches=count, precision="bf16")) for count in (8, 64))
    assert few.bubble_s / few.total_s > many.bubble_s / many.total_s
    # 32 blocks on 8 stages, the head on the last: the others take less than (p - 1) times the slowest
    slowest_s = (few.total_s - few.bubble_s - few.data_s - few.optimizer_s - few.fixed_s - few.pipeline_s) / 8
    assert 0.5 * 7 * slowest_s < few.bubble_s < 7.1 * slowest_s


def test_interleaving_divides_the_bubble():
    plain = estimate(Plan(8, pipeline=8, micro_batches=16, precision="bf16"))
    split = estimate(Plan(8, pipeline=8, micro_batches=16, schedule="interleaved", precision="bf16"))
    assert split.bubble_s == pytest.approx(plain.bubble_s / 2, rel=0.05)
    assert split.pipeline_s == pytest.approx(2 * plain.pipeline_s)


def test_full_recomputation_costs_a_forward_of_the_blocks():
    plain, again = (estimate(Plan(1, 64, precision="bf16", recompute=kind)) for kind in ("none", "full"))
    assert 0.8 * plain.forward_s < again.recompute_s < plain.forward_s
    assert again.forward_s == plain.forward_s


def test_a_loss_of_the_script_costs_a_forward_with_micro_batches_only():
    outside = replace(LARGE_PROFILE, loss_outside=True)
    for plan, forwards in ((Plan(64, precision="bf16"), 0.0), (Plan(64, micro_batches=8, precision="bf16"), 1.0)):
        inside_s, outside_s = (estimate_step(one, plan, 512, CLUSTER) for one in (LARGE_PROFILE, outside))
        assert outside_s.recompute_s - inside_s.recompute_s == pytest.approx(forwards * inside_s.forward_s)


def test_a_tensor_axis_that_leaves_the_node_is_slower():
    inside = estimate(Plan(8, tensor=8, precision="bf16", micro_batches=8))
    outside = estimate(Plan(4, tensor=16, precision="bf16", micro_batches=8))
    assert outside.tensor_s > 2 * inside.tensor_s


def test_small_micro_batches_wait_for_the_host():
    plan = Plan(8, tensor=8, sequence_parallel=True, precision="bf16")
    small = estimate(replace(plan, micro_batches=64), system=EAGER_MEGATRON)
    large = estimate(replace(plan, micro_batches=4), system=EAGER_MEGATRON)
    assert small.host_s > 0.0
    assert large.host_s / large.total_s < small.host_s / small.total_s


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(PlanError, match="needs 128 devices, the cluster has 64"):
        estimate(Plan(128))


def test_memory_and_time_of_a_candidate_are_cheap():
    profile = profile_of(TransformerShape(80, 8192, 28672, 64, 8, 128, 128256, name="70B"), 4096)
    cluster, plan = find_cluster("1024xMI250"), Plan(8, 8, tensor=8, pipeline=2, micro_batches=16, precision="bf16")
    calls: list[str] = []
    estimate_memory(profile, plan, 1024)  # what is the same for all candidates is remembered
    estimate_step(profile, plan, 1024, cluster)
    sys.setprofile(lambda frame, event, argument: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        estimate_memory(profile, plan, 1024)
        estimate_step(profile, plan, 1024, cluster)
    finally:
        sys.setprofile(None)
    assert len(calls) < 250, "Python calls: 188 when this was written, 40 to 220 microseconds"
