"""What a device holds while its parameters are in host memory, moment by moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.host_memory_moments import Parts, moments_on_host

NOTHING = Parts(**dict.fromkeys(Parts.__dataclass_fields__, 0))
BLOCKS = replace(NOTHING, computed=2.0, block=2.0, block_trained=1.0, blocks=4)
"""Four blocks of one parameter, computed in 16 bits."""


def most(parts: Parts, **plan: int) -> float:
    return max(sum(moment) for moment in moments_on_host(parts, Plan(offload="all", precision="bf16", **plan)))


def test_a_block_computes_beside_the_gradients_of_the_one_before():
    assert most(BLOCKS) == 2.0 + 2.0 + 4.0  # its weights, its gradients, and those before in float32
    assert most(replace(BLOCKS, blocks=1)) == 2.0 + 2.0
    assert most(BLOCKS, shard=8) == 8.0 + 2.0  # and the next block is on its way


def test_frozen_blocks_have_no_gradients():
    assert most(replace(BLOCKS, block_trained=0.0)) == 2.0


def test_replicas_keep_what_was_reduced_until_the_backward_ends():
    assert most(BLOCKS, replicate=2) == 8.0 + 3 * 4.0
    assert most(BLOCKS, replicate=2, shard=2) == 2.0 + 2.0 + 4.0 + 3 * 2.0
    after = replace(BLOCKS, first_unit=1.0, units_trained=True)
    assert most(after, replicate=2) == 4.0 + 4 * 4.0 + 6.0  # beside the last block's gradients and what was reduced


def test_layers_outside_arrive_and_leave_alone():
    head = replace(NOTHING, computed=2.0, blocks=1, last_unit=1.0)
    assert most(head) == 6.0  # in float32, then cast
    assert most(head, shard=2) == 4.0  # what was gathered, and where it is copied to
    assert most(replace(head, units_trained=True)) == 8.0
    assert most(replace(head, units_trained=True), shard=2) == 2.0 + 4.0 + 2.0
    assert most(replace(head, units_trained=True, all_kept=3.0, of_logits=1.0, results=1.0)) == 3.0 + 1.0 + 8.0


def test_activations_are_there_at_the_begin_and_what_the_norm_makes_at_the_end():
    parts = replace(BLOCKS, all_kept=40.0, everything=10.0, after_first=30.0, next_to_last=10.0, last=10.0, closing=3.0)
    assert most(parts) == 40.0 + 3.0 + 2.0
    recomputed = replace(parts, all_kept=4.0, after_first=3.0, next_to_last=1.0, last=1.0)
    assert most(recomputed) == 2.0 + 10.0 + 3.0 + 2.0 + 4.0
    assert most(replace(recomputed, norm=20.0)) == 2.0 + 20.0 + 8.0


def test_the_gradient_of_a_shared_weight_is_made_twice():
    tied = replace(NOTHING, computed=2.0, blocks=2, rest=2.0, rest_trained=1.0, waiting=2.0)
    assert most(tied) == 8.0  # its gradients leave
    assert most(replace(tied, made_twice=1.0)) == pytest.approx(8.0)
    assert most(replace(tied, block_trained=1.0)) == 4.0 + 8.0  # beside those of the last block
    assert most(replace(tied, made_twice=4.0, block_trained=1.0)) == 2.0 + 2.0 + 4.0 + 4 * 2.0
    assert most(replace(tied, all_kept=5.0, of_logits=3.0)) == 5.0 + 3.0 + 2.0 + 2.0
