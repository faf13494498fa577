"""Bytes that a forward keeps for its backward: activations, logits, and what a loss makes of logits.

Decides what each block, the layers after the blocks and the loss keep. Must not know when in a step these bytes are
there: that is for `peak_moment.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.stage_positions import StagePosition
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, ModelProfile

__all__ = ["KeptActivations", "LogitBytes", "kept_activations", "logit_bytes"]


class KeptActivations(NamedTuple):
    """Bytes of activations on a device, those of logits not counted.

    Attributes:
        total: Of all blocks and the layers after them, of all micro-batches under way.
        of_block: Of one block of one micro-batch when its backward begins: all that its forward computes.
        next_to_last: What the last block but one keeps of a micro-batch until its backward.
        last: What the last block keeps of a micro-batch until its backward.
    """

    total: float
    of_block: float
    next_to_last: float
    last: float


class LogitBytes(NamedTuple):
    """Bytes of a device's logits.

    Attributes:
        results: Logits that stay as results of the forward.
        loss: What the loss makes of logits.
        gradients: Gradients of logits that its backward gives.
    """

    results: float
    loss: float
    gradients: float


def kept_activations(
    profile: ModelProfile, plan: Plan, rows: int, system: TrainingSystem, stage: StagePosition
) -> KeptActivations:
    """Returns the activations that a device at a position of the pipeline keeps; `rows` are those of a micro-batch."""
    everything, boundary, partial = (rows * one for one in _block_bytes_per_row(profile, plan, system))
    first, next_to_last, last = _kept_of_ends(plan, stage.blocks, everything, boundary, partial)
    recomputed = stage.blocks if plan.recompute in ("full", "selective") else 0
    if isinstance(plan.recompute, int):
        recomputed = min(stage.blocks, plan.recompute)
    total = (recomputed * first + (stage.blocks - recomputed) * everything) * stage.in_flight
    if stage.has_last:
        total += rows * _outside_bytes_per_row(profile, plan, system)
    return KeptActivations(total, everything, next_to_last, last)


def logit_bytes(
    profile: ModelProfile, plan: Plan, system: TrainingSystem, stage: StagePosition, elements: float, computed: float
) -> LogitBytes:
    """Returns the bytes of logits, and of what a loss makes of them.

    A script that computes the loss itself gives the gradients of all results to the backward, which keeps them to its
    end. With micro-batches each of these computes its logits once more in the backward.

    Args:
        profile: The model.
        plan: The plan.
        system: How the program executes plans.
        stage: The position in the pipeline.
        elements: Logits of a micro-batch on a device.
        computed: Bytes of each.
    """
    is_result = system.logits_stay and profile.logits_returned
    whole = elements * plan.micro_batches
    results = whole * computed if is_result else 0.0
    kept_for_loss, in_backward = system.logits_kept_bytes, system.logits_peak_bytes
    if profile.loss_outside:
        again = elements * computed if plan.micro_batches > 1 else 0.0
        if system.takes_logits_in_chunks(plan, profile.logits_per_token, whole):
            return LogitBytes(2.0 * results, again, again)
        copies = max(0.0, whole * (kept_for_loss + in_backward) - results)
        return LogitBytes(2.0 * results, max(copies, again), again)
    if system.takes_logits_in_chunks(plan, profile.logits_per_token, elements):
        kept_for_loss, in_backward = 0.0 if is_result else computed, computed  # what the loss keeps are the results
    in_loss = stage.in_flight if plan.schedule == "gpipe" else 1.0
    return LogitBytes(results, elements * (kept_for_loss * in_loss + in_backward), elements * computed)


def _block_bytes_per_row(profile: ModelProfile, plan: Plan, system: TrainingSystem) -> tuple[float, float, float]:
    """Returns what a block keeps of one row: everything, what it was given, and under selective recomputation."""
    wide = plan.bytes_per_value / BYTES_PER_VALUE
    block, length = profile.block, profile.sequence_length
    whole = length / plan.tensor if plan.sequence_parallel else length
    split = block.kept_split_bytes_per_token
    if not system.rotation_kept and block.attention_width:
        queries = block.attention_flops_per_row / (2.0 * length * length)
        split -= block.products[0].outer + queries  # 2 bytes of each query and key
    everything = wide * (split * length / plan.tensor + block.kept_replicated_bytes_per_token * whole)
    everything += 2.0 * system.norm_kept_bytes * profile.hidden * whole
    everything += wide * system.gathered_kept * profile.hidden * (length - whole)  # whole inputs of split products
    # Of a block that is computed again, what it is given is kept whole: with sequence parallelism too it is gathered
    # where it is kept. So are the results of the products that the tensor axis sums: they are kept before the sum.
    partial = block.selective_split_bytes_per_token * length / plan.tensor
    partial += (block.selective_replicated_bytes_per_token + system.selective_kept_bytes * profile.hidden) * length
    return everything, wide * 2.0 * profile.hidden * length, wide * partial


def _kept_of_ends(
    plan: Plan, blocks: int, everything: float, boundary: float, partial: float
) -> tuple[float, float, float]:
    """Returns what the first block of a device, the last but one and the last keep of a micro-batch."""
    if plan.recompute == "selective":
        return partial, partial, partial
    count = {"none": 0, "full": blocks}.get(str(plan.recompute), plan.recompute)
    assert isinstance(count, int)
    first, next_to_last, last = (boundary if count > block else everything for block in (0, blocks - 2, blocks - 1))
    return first, next_to_last, last


def _outside_bytes_per_row(profile: ModelProfile, plan: Plan, system: TrainingSystem) -> float:
    """Returns what the part after the blocks keeps of one row."""
    wide = plan.bytes_per_value / BYTES_PER_VALUE
    whole = profile.sequence_length / plan.tensor if plan.sequence_parallel else profile.sequence_length
    return profile.last.kept_bytes_per_row(profile.sequence_length, plan.tensor, plan.sequence_parallel) * wide + (
        system.norm_kept_bytes * profile.hidden * whole
    )
