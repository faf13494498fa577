"""The moment of a step at which a device holds most, where gradients come as activations go."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.peak_moment import peak_moment
from moreh_ap.planner.cost.stage_positions import parameters_at, positions_of
from moreh_ap.planner.cost.training_systems import MOREH_AP
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of

PROFILE = profile_of(TransformerShape(8, 256, 1024, 8, 8, 32, 1000, tied=False), 128)


def peak(plan, rows=4, system=MOREH_AP, position=0):
    stage = positions_of(PROFILE, plan, system)[position]
    parameters = parameters_at(PROFILE, plan, stage)
    gradients = system.gradient_bytes * parameters / plan.shard
    return peak_moment(PROFILE, plan, rows, system, stage, parameters, gradients)


def test_many_rows_are_fullest_with_all_activations():
    few, many = (peak(Plan(), rows) for rows in (64, 128))
    assert many[0] == pytest.approx(2 * few[0], rel=0.1) and many[1] == pytest.approx(2 * few[1], rel=0.1)


def test_few_rows_are_fullest_in_the_optimizers_step():
    activations, logits, temporary = peak(Plan(), rows=1, system=replace(MOREH_AP, step_copy_bytes=64.0))
    assert (activations, logits) == (0.0, 0.0)
    assert temporary == pytest.approx(64.0 * PROFILE.parameters)


def test_offloaded_state_makes_no_copies_on_the_device():
    copying = replace(MOREH_AP, step_copy_bytes=64.0)
    kept, offloaded = (sum(peak(Plan(offload=offload), 1, copying)) for offload in ("none", "optimizer"))
    assert offloaded < 0.5 * kept


def test_gradients_that_have_not_come_yet_leave_room():
    """Many rows are fullest before the backward, when a sharded model has no gradients: all of them are room."""
    plan = Plan(shard=4, precision="bf16")
    (stage,) = positions_of(PROFILE, plan, MOREH_AP)
    parameters = parameters_at(PROFILE, plan, stage)
    without, some = (sum(peak_moment(PROFILE, plan, 64, MOREH_AP, stage, parameters, each)) for each in (0.0, 1e6))
    assert without - some == pytest.approx(1e6)


@pytest.mark.parametrize("plan", ["replicate=1", "shard=4,precision=bf16", "tensor=2", "pipeline=2,micro_batches=4"])
@pytest.mark.parametrize("rows", [1, 16, 256])
def test_nothing_is_negative(plan, rows):
    for position in range(len(positions_of(PROFILE, Plan.parse(plan), MOREH_AP))):
        assert min(peak(Plan.parse(plan), rows, position=position)) >= 0.0


def test_recomputing_keeps_what_blocks_are_given():
    everything, selective, full = (peak(Plan(recompute=kind), 64)[0] for kind in ("none", "selective", "full"))
    assert everything > selective > full
    some = [peak(Plan(recompute=blocks), 64)[0] for blocks in (2, 4, 6)]
    assert everything > some[0] > some[1] > some[2] >= full


@pytest.mark.parametrize("precision, before, after", [("fp32", 16.0, 8.0), ("bf16", 14.0, 4.0)])
def test_many_logits_have_no_copies_in_float32(precision, before, after):
    """Results and their gradients take 4 bytes a logit each, in bfloat16 2."""
    plan = Plan(shard=2, precision=precision)
    few = replace(MOREH_AP, chunked_logits=1e12)
    many = replace(MOREH_AP, chunked_logits=1.0, chunked_classes=1000)
    elements = 1024 * PROFILE.sequence_length * PROFILE.logits_per_token
    assert peak(plan, 1024, few)[1] == pytest.approx(before * elements, rel=0.05)
    assert peak(plan, 1024, many)[1] == pytest.approx(after * elements, rel=0.05)
    assert peak(plan, 1024, replace(many, chunked_classes=1001)) == peak(plan, 1024, few)


def test_large_layers_outside_of_blocks_are_not_there_all_the_time():
    """Where they are units, the weights of the first ones and of a block are not there during the loss."""
    plan, fewest = Plan(shard=8, precision="bf16"), PROFILE.last.parameters
    with_units = peak(plan, 64, replace(MOREH_AP, outer_unit_parameters=fewest / 2))
    without = peak(plan, 64, replace(MOREH_AP, outer_unit_parameters=2 * fewest))
    assert sum(without) - sum(with_units) == pytest.approx(2.0 * (PROFILE.first.parameters + PROFILE.block.parameters))


@pytest.mark.parametrize("plan", ["replicate=8,precision=bf16", "shard=2,pipeline=2,micro_batches=4"])
def test_units_are_for_plans_that_free_what_was_gathered(plan):
    assert replace(MOREH_AP, outer_unit_parameters=1.0).outer_units(Plan.parse(plan), PROFILE) == (0.0, 0.0)


@pytest.mark.parametrize("precision, computed", [("fp32", 4.0), ("bf16", 2.0)])
def test_a_loss_of_the_script_has_the_gradients_of_all_results(precision, computed):
    """With micro-batches each of these computes its logits again; a forward that returns none keeps its own."""
    many = replace(MOREH_AP, chunked_logits=1.0, chunked_classes=1000)
    elements = 1024 * PROFILE.sequence_length * PROFILE.logits_per_token

    def logits_of(micro_batches, **place):
        plan = Plan(shard=2, precision=precision, micro_batches=micro_batches)
        (stage,) = positions_of(PROFILE, plan, many)
        parameters = parameters_at(PROFILE, plan, stage)
        gradients = many.gradient_bytes * parameters / plan.shard
        return peak_moment(replace(PROFILE, **place), plan, 1024, many, stage, parameters, gradients)[1] / elements

    near = functools.partial(pytest.approx, rel=0.05)
    assert logits_of(1) == logits_of(1, loss_outside=True) == near(2 * computed)
    assert logits_of(4) == near((4 + 1) * computed)
    assert logits_of(4, loss_outside=True) == near((4 + 4 + 1) * computed)
    assert logits_of(4, logits_returned=False) == logits_of(1) == near(2 * computed)
