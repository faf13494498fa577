"""The order of a pipeline is PyTorch's, and played it takes the time that the literature gives."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost import timeline
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.model_profile import LayerProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.planning_task import Task

PIPELINES = [
    "pipeline=4,micro_batches=8",
    "pipeline=3,micro_batches=3",
    "pipeline=4,micro_batches=5,schedule=gpipe",
    "pipeline=4,micro_batches=8,schedule=interleaved",
    "pipeline=4,micro_batches=10,schedule=interleaved,stages_per_device=3",
    "pipeline=4,micro_batches=3,schedule=interleaved",
    "pipeline=4,micro_batches=8,schedule=zero_bubble",
    "pipeline=2,micro_batches=3,schedule=zero_bubble,stages_per_device=2",
    "pipeline=4,micro_batches=2,schedule=zero_bubble",
]


@pytest.mark.parametrize("text", PIPELINES)
def test_order_is_that_of_pytorch(text):
    from torch.distributed.pipelining import schedules

    plan = Plan.parse(text)
    names = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    rounds = max(1, plan.micro_batches // plan.pipeline)
    like = SimpleNamespace(
        _num_stages=plan.pipeline, _n_microbatches=plan.micro_batches, n_local_stages=plan.stages_per_device,
        microbatches_per_round=plan.micro_batches // rounds, pp_group_size=plan.pipeline,
    )  # fmt: skip
    for device, actions in enumerate(timeline.order_of(plan)):
        if plan.schedule in ("gpipe", "1f1b"):
            kind = schedules.ScheduleGPipe if plan.schedule == "gpipe" else schedules.Schedule1F1B
            theirs = kind._get_pipeline_order(like)[device]
        else:
            zero = plan.schedule == "zero_bubble"
            kind = schedules.ScheduleInterleavedZeroBubble if zero else schedules.ScheduleInterleaved1F1B
            theirs = kind._calculate_single_rank_operations(like, device)
        theirs = [one for one in theirs if one is not None and one.computation_type.name in names]
        expected = [(names[one.computation_type.name], one.stage_index) for one in theirs]
        assert [(one.kind, one.stage) for one in actions] == expected
        if plan.schedule != "1f1b":  # whose order PyTorch prints from 1 on the last device; what it runs begins with 0
            assert [one.micro_batch for one in actions] == [one.microbatch_index for one in theirs]


@pytest.mark.parametrize("text", PIPELINES)
def test_every_action_once_and_none_overlap(text):
    plan = Plan.parse(text)
    bars = timeline.simulate(plan, [(1.0, 2.0)] * plan.num_stages)
    assert len({bar.action for bar in bars}) == len(bars)
    assert len(bars) == (3 if plan.schedule == "zero_bubble" else 2) * plan.num_stages * plan.micro_batches
    for device in range(plan.pipeline):
        mine = [bar for bar in bars if bar.device == device]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(mine))
        assert sum(bar.end_s - bar.start_s for bar in mine) == plan.stages_per_device * plan.micro_batches * 3.0


def test_the_bubble_of_the_literature():
    def last_s(text):
        plan = Plan.parse(text)
        stage = (1.0 / plan.stages_per_device, 2.0 / plan.stages_per_device)
        return max(bar.end_s for bar in timeline.simulate(plan, [stage] * plan.num_stages))

    assert last_s("pipeline=4,micro_batches=8") == (8 + 3) * 3
    assert last_s("pipeline=4,micro_batches=8,schedule=gpipe") == (8 + 3) * 3
    assert last_s("pipeline=4,micro_batches=8,schedule=interleaved") == pytest.approx(8 * 3 + 3 * 3 / 2)
    assert last_s("pipeline=4,micro_batches=8,schedule=zero_bubble") == 8 * 3 + 3


def test_the_slowest_device_takes_what_the_estimate_says():
    plan = Plan(pipeline=4, micro_batches=8, precision="bf16")
    profile = profile_of(TransformerShape(8, 1024, 4096, 16, 4, 64, 32000), 1024)
    task = Task(profile, find_cluster("4xH100"), 32)
    step = task.step_of(plan)
    seconds = timeline.stage_seconds(profile, plan, step)
    expected = step.forward_s + step.backward_s + step.recompute_s + step.host_s + step.tensor_s
    assert max(map(sum, seconds)) * 8 == pytest.approx(expected)
    bare = replace(profile, first=LayerProfile(), block=LayerProfile(parameters_replicated=10.0), last=LayerProfile())
    assert len(set(timeline.stage_seconds(bare, plan, step))) == 1, "nothing is known of it: stages are taken as equal"
