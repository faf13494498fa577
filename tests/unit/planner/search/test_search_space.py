"""The plans that are looked at: all devices used, none twice, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.constraints import ALL_KINDS, Constraints
from moreh_ap.planner.search.search_space import (
    enumerate_axes,
    micro_batch_counts,
    pipeline_orders,
    recompute_kinds,
    tensor_degrees_of,
)

SHAPE = TransformerShape(24, 1024, 4096, 16, 4, 64, 32000)
PROFILE = profile_of(SHAPE, 512)


def dealt(num_devices, per_node=8, across_nodes=False, profile=PROFILE, **settings):
    return list(enumerate_axes(profile, num_devices, per_node, Constraints(**settings), across_nodes=across_nodes))


def plans(num_devices, rows, **settings):
    constraints = Constraints(**settings)
    for one in enumerate_axes(PROFILE, num_devices, 8, constraints, across_nodes=False):
        for order in pipeline_orders(PROFILE, one.pipeline, constraints):
            for count in micro_batch_counts(rows, one.pipeline, order, constraints):
                for level in recompute_kinds(24, constraints):
                    yield Plan(
                        one.replicate,
                        one.shard,
                        tensor=one.tensor,
                        sequence_parallel=one.sequence_parallel,
                        pipeline=one.pipeline,
                        micro_batches=count,
                        schedule=order.schedule,
                        stages_per_device=order.stages_per_device,
                        layers=order.layers,
                        recompute=level,
                    )


@pytest.mark.parametrize("num_devices", [1, 2, 6, 8, 24, 60, 64, 96, 720, 1024])
def test_every_plan_uses_all_devices_and_the_blocks_go_round(num_devices):
    found = set(plans(num_devices, 16))
    assert found
    for plan in found:
        assert plan.num_devices == num_devices
        assert sum(map(len, plan.stage_ranges(24))) == 24


def test_nothing_is_looked_at_twice():
    found = list(plans(64, 24))
    assert len(found) == len(set(found))


def test_what_eight_devices_allow():
    found = set(plans(8, 8))
    for text in (
        "replicate=8",
        "shard=8",
        "replicate=2,shard=4",
        "shard=2,tensor=4",
        "shard=2,tensor=4,sequence_parallel=true",
        "tensor=2,pipeline=4,micro_batches=8,schedule=zero_bubble",
        "pipeline=8,micro_batches=4,schedule=gpipe",
        "replicate=4,pipeline=2,micro_batches=4,schedule=interleaved,stages_per_device=4",
        "replicate=8,micro_batches=4,recompute=selective",
        "pipeline=8,micro_batches=8,recompute=full",
    ):
        assert Plan.parse(text) in found, text


@pytest.mark.parametrize(
    ("settings", "holds"),
    [
        ({"pipeline_parallel": False}, lambda plan: plan.pipeline == 1),
        ({"num_stages": 4}, lambda plan: plan.num_stages <= 4),
        ({"num_micro_batches": 4}, lambda plan: plan.micro_batches == 4),
        ({"activation_recomputation": False}, lambda plan: plan.recompute == "none"),
        ({"activation_recomputation": True}, lambda plan: plan.recompute in ("selective", "full")),
        ({"distribute_parameter": False}, lambda plan: plan.shard == 1),
        ({"distribute_parameter": True}, lambda plan: plan.shard > 1 or plan.replicate == 1),
        ({"kinds": frozenset()}, lambda plan: plan.tensor == plan.pipeline == 1),
        ({"kinds": frozenset({"tensor"})}, lambda plan: plan.pipeline == 1 and not plan.sequence_parallel),
        ({"tensor_degrees": (1, 4)}, lambda plan: plan.tensor in (1, 4)),
    ],
)
def test_options_hold_for_every_plan_and_leave_some(settings, holds):
    free, left = set(plans(16, 16)), set(plans(16, 16, **settings))
    assert left
    assert all(map(holds, left))
    assert any(not holds(plan) for plan in free), "the option forbids nothing"


def test_tensor_axis_across_nodes_is_another_pass():
    inside, across = dealt(16, per_node=4), dealt(16, per_node=4, across_nodes=True)
    assert {one.tensor for one in inside} == {1, 2, 4}
    assert {one.tensor for one in across} == {8, 16}


def test_tensor_degrees_of_heads():
    assert tensor_degrees_of(SHAPE, 64) == (1, 2, 4, 8, 16)
    assert tensor_degrees_of(replace(SHAPE, num_heads=12, num_kv_heads=4, ffn_hidden=4095), 64) == (1,)
    assert tensor_degrees_of(replace(SHAPE, num_heads=9, num_kv_heads=3, ffn_hidden=1536), 64) == (1, 3)
    assert tensor_degrees_of(SHAPE, 4) == (1, 2, 4)


def test_without_products_there_is_no_tensor_axis():
    bare = ModelProfile("bare", 1, 1, 4, LayerProfile(), LayerProfile(parameters_replicated=10.0), LayerProfile())
    assert {one.tensor for one in dealt(4, profile=bare)} == {1}
    assert {one.pipeline for one in dealt(4, profile=bare)} == {1, 2, 4}


def test_a_model_without_blocks_has_no_pipeline_and_recomputes_nothing():
    assert recompute_kinds(0, Constraints()) == ("none",)
    bare = ModelProfile("bare", 1, 1, 0, LayerProfile(parameters_replicated=10.0), LayerProfile(), LayerProfile())
    assert {(one.replicate, one.shard, one.pipeline) for one in dealt(2, profile=bare)} == {(2, 1, 1), (1, 2, 1)}


def test_split_sequences_alone_where_there_are_many_devices():
    def choices(num_devices, **settings):
        return {one.sequence_parallel for one in dealt(num_devices, **settings) if one.tensor > 1}

    assert choices(8) == {False, True}
    assert choices(64) == {True}
    assert choices(64, kinds=ALL_KINDS - {"sequence_parallel"}) == {False}


def test_gpipe_only_where_the_batch_is_too_small_for_the_others():
    free = Constraints()
    orders = pipeline_orders(PROFILE, 4, free)
    schedules = {order.schedule for order in orders for _ in micro_batch_counts(2, 4, order, free)}
    assert schedules == {"gpipe"}
    counts = {order.schedule: micro_batch_counts(16, 4, order, free) for order in orders}
    assert counts["gpipe"] == [1, 2]
    assert counts["1f1b"] == counts["zero_bubble"] == counts["interleaved"] == [4, 8, 16]
    odd = {order.schedule: micro_batch_counts(18, 4, order, free) for order in pipeline_orders(PROFILE, 4, free)}
    assert odd["1f1b"] == [6, 9, 18]
    assert odd["interleaved"] == [6], "9 and 18 do not divide among 2 and 4 rounds"


def test_micro_batches_are_divisors_of_the_rows():
    order = pipeline_orders(PROFILE, 1, Constraints())[0]
    assert micro_batch_counts(24, 1, order, Constraints()) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert micro_batch_counts(13, 1, order, Constraints()) == [1, 2, 4, 8, 13]


def test_lighter_last_stage_only_where_the_head_weighs():
    heavy = [order.layers for order in pipeline_orders(PROFILE, 4, Constraints()) if order.layers]
    assert heavy and all(sum(layers) == 24 and layers[-1] < 6 for layers in heavy)
    light = profile_of(replace(SHAPE, vocabulary=1000), 512)
    assert not any(order.layers for order in pipeline_orders(light, 4, Constraints()))


def test_numbers_with_many_divisors_are_thinned():
    many = dealt(5040)
    assert len({one.pipeline for one in many}) < len([size for size in range(1, 25) if 5040 % size == 0])
    kept = {one.shard for one in many if one.tensor == one.pipeline == 1}
    assert {1, 5040} <= kept and len(kept) < 60  # it has 60 divisors
    for size in (size for size in range(1, 5041) if 5040 % size == 0):
        assert any(size / 1.5 <= one <= size * 1.5 for one in kept), size
    assert all(prod((one.replicate, one.shard, one.tensor, one.pipeline)) == 5040 for one in many)
