"""The memory formula: state, activations, fullest position."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import Coefficients
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.cost.training_systems import EAGER_MEGATRON, MOREH_AP
from moreh_ap.planner.profiles.transformer_shape import profile_of
from unit.planner.cost.samples import SMALL, SMALL_PROFILE

PARAMETERS = SMALL.parameters


def estimate(plan, rows=16, system=MOREH_AP, profile=SMALL_PROFILE, **kwargs):
    return estimate_memory(profile, plan, rows, system, **kwargs)


def test_state_of_one_device_in_float32():
    found = estimate(Plan())
    assert found.parameter_bytes == 4 * PARAMETERS
    assert found.gradient_bytes == 4 * PARAMETERS
    assert found.optimizer_bytes == 8 * PARAMETERS


def test_sharding_divides_state_by_the_group():
    whole, shared = estimate(Plan(8), 64), estimate(Plan(1, 8), 64)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        assert getattr(shared, name) == pytest.approx(getattr(whole, name) / 8), name
    assert shared.activation_bytes == whole.activation_bytes


def test_micro_batches_leave_a_shard_of_the_gradients():
    once, twice = estimate(Plan(1, 8), 64), estimate(Plan(1, 8, micro_batches=2), 64)
    assert twice.gradient_bytes == once.gradient_bytes == pytest.approx(4 * PARAMETERS / 8)
    assert twice.activation_bytes == once.activation_bytes / 2


def test_gradients_stay_whole_until_the_last_micro_batch_of_a_pipeline():
    shares = [estimate(Plan(1, shard, pipeline=2, micro_batches=4), 64, position=0).gradient_bytes for shard in (1, 8)]
    assert shares[1] == pytest.approx(shares[0] * 9 / 8)  # whole ones beside the shard


def test_a_sharded_optimizer_is_all_that_zero_1_shards():
    plan = Plan(8, precision="bf16")
    plain, zero = (estimate(plan, 64, EAGER_MEGATRON.with_zero_stage(stage)) for stage in (0, 1))
    assert zero.optimizer_bytes == plain.optimizer_bytes / 8
    assert zero.gradient_bytes == plain.gradient_bytes
    assert plain.parameter_bytes - zero.parameter_bytes == pytest.approx(4 * PARAMETERS * 7 / 8)


def test_state_of_the_sweeps_program_is_20_bytes_a_parameter():
    found = estimate(Plan(8, precision="bf16"), 64, EAGER_MEGATRON)
    state = found.parameter_bytes + found.gradient_bytes + found.optimizer_bytes
    # weights and buckets in 16 bits; gradients, weights and two averages in float32
    assert state == pytest.approx(20 * PARAMETERS)


def test_a_tensor_axis_splits_everything_but_norms():
    one, four = estimate(Plan()), estimate(Plan(tensor=4))
    norms = 17 * 1024
    assert four.parameter_bytes == pytest.approx(4 * ((PARAMETERS - norms) / 4 + norms))
    split = estimate(Plan(tensor=4, sequence_parallel=True))
    # inputs that are gathered for split products stay whole
    assert one.activation_bytes / 4 < split.activation_bytes < four.activation_bytes < one.activation_bytes


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_block_that_is_computed_again_keeps_as_much_with_split_sequences(kind):
    deeper = profile_of(replace(SMALL, num_layers=16), 2048)

    def eight_more(split: bool, recompute: str) -> float:
        plan = Plan(tensor=4, sequence_parallel=split, recompute=recompute)
        return estimate(plan, profile=deeper).activation_bytes - estimate(plan).activation_bytes

    assert eight_more(True, kind) == pytest.approx(eight_more(False, kind)), (
        "what it is given is whole where it is kept"
    )
    assert eight_more(True, "none") < eight_more(False, "none")


def test_recomputation_keeps_less_in_this_order():
    kept = [estimate(Plan(recompute=kind)).activation_bytes for kind in ("none", 2, "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_1f1b_keeps_as_many_micro_batches_as_stages_and_gpipe_all():
    one_forward = estimate(Plan(pipeline=4, micro_batches=16), position=0)
    all_forwards = estimate(Plan(pipeline=4, micro_batches=16, schedule="gpipe"), position=0)
    # the first stage has two of eight blocks in either case
    assert all_forwards.activation_bytes == pytest.approx(4 * one_forward.activation_bytes)


def test_the_fullest_position_counts_and_any_can_be_asked_for():
    plan = Plan(pipeline=4, micro_batches=4)
    places = [estimate(plan, position=place) for place in range(4)]
    assert estimate(plan).reserved_bytes == max(place.reserved_bytes for place in places)
    assert [place.logit_bytes > 0 for place in places] == [False, False, False, True]
    assert estimate(plan).position == max(range(4), key=lambda place: places[place].reserved_bytes)
    with pytest.raises(PlanError, match="no position 4"):
        estimate(plan, position=4)


def test_a_tied_head_is_kept_twice_in_a_pipeline():
    tied = profile_of(replace(SMALL, tied=True), 2048)
    last = estimate(Plan(pipeline=2), profile=tied, position=1)
    assert last.parameter_bytes == pytest.approx(4 * (4 * tied.block.parameters + 1024 + 32000 * 1024))


def test_offloaded_parameters_are_on_the_device_for_their_computation_alone():
    kept, offloaded = (estimate(Plan(shard=2, recompute="full", offload=word)) for word in ("none", "all"))
    assert offloaded.parameter_bytes == offloaded.gradient_bytes == offloaded.optimizer_bytes == 0.0
    state = kept.parameter_bytes + kept.gradient_bytes + kept.optimizer_bytes
    assert state < offloaded.host_bytes < 1.25 * state  # pinned memory is rounded up
    assert 0.0 < offloaded.temporary_bytes < 0.5 * state
    assert offloaded.scaled(2.0).host_bytes == offloaded.host_bytes
    alone = estimate(Plan(recompute="full", offload="all"))
    assert alone.host_bytes == pytest.approx(2 * offloaded.host_bytes)
    assert alone.temporary_bytes < 0.5 * state
    short = replace(SMALL_PROFILE, sequence_length=8)
    one, two = (estimate(Plan(count, 2, offload="all"), 2 * count, profile=short) for count in (1, 2))
    assert two.temporary_bytes > one.temporary_bytes + PARAMETERS  # what was summed over replicas stays for a while


def test_offloaded_state_is_not_on_the_device():
    assert estimate(Plan(offload="optimizer")).optimizer_bytes == 0.0


def test_the_allocator_holds_more_than_is_in_use():
    found = estimate(Plan(), coefficients=Coefficients(fragmentation=0.1, reserved_bytes=1000.0))
    transient = found.activation_bytes + found.logit_bytes + found.temporary_bytes
    assert found.reserved_bytes - found.allocated_bytes == pytest.approx(1000.0 + 0.1 * transient)
