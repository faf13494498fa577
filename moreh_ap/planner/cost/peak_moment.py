"""The moment of a step at which a device holds most, where gradients come as activations go.

Decides what a device holds at each of these moments beyond the state, which is always there. Must not know
architectures, devices or seconds.

[Note: moments]
Where a step begins without gradients (`TrainingSystem.gradients_come`), they come block by block as activations go, and
there are five moments at which a device may be fullest. With activations `A`, of which a block keeps `K`, and `E` more
of a block that is computed again; a block's parameters `B` and those outside of blocks `R`, in the computation's
precision; and `4B` for a block's gradients in float32 on their way to the other devices (with micro-batches all
gradients of the last but one are there beside; frozen weights have none):

1. the loss, or the begin of the backward: A, the logits and what the loss makes of them, R and the next block gathered;
2. the backward of the last block but one, when the gradients of the last are on their way: A - K + E, the results,
   R, the block, the one gathered ahead, 4B; or, at the end of that block, its gradients instead of its activations;
3. the same in the first block, with all gradients but its own and only its own activations;
4. the gradients of parameters outside of blocks in flight, with all others;
5. the optimizer's step.

With `offload=all` neither weights nor gradients are there beside: `host_memory_moments.py` has other moments.

Layers outside of blocks that are units of their own (`TrainingSystem.outer_units`) are not in R. The last ones, `H`,
are gathered in moment 1; behind it they are there twice (what arrives and weights, or weights and gradients, in the
computation's precision), and then gradients, with `4H` on their way until the last block's backward is through. The
first ones, `F`, are gathered ahead in the first block's backward, then there are weights and gradients, then `4F`.

Between 2 and 3 everything grows or shrinks evenly. Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
(`post_backward` keeps the last block's reduced buffer until the next one's), and `scripts/check_memory.py`.
"""

from __future__ import annotations

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.host_memory_moments import Parts, moments_on_host
from moreh_ap.planner.cost.stage_positions import StagePosition, trained_at
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["peak_moment"]

_OF_NORM = 6.0
"""What a norm has in its backward, in what it keeps (`TrainingSystem.norm_kept_bytes`): that, and five results in
float32. Source: autograd of `LlamaRMSNorm`, transformers/models/llama/modeling_llama.py."""


def peak_moment(
    profile: ModelProfile,
    plan: Plan,
    rows: int,
    system: TrainingSystem,
    stage: StagePosition,
    parameters: float,
    gradients: float,
) -> tuple[float, float, float]:
    """Returns activations, logits and temporary bytes at the fullest of [Note: moments].

    Gradients that are not there yet leave room: it is taken off the temporary bytes, then off the others.
    """
    computed = 2.0 if plan.precision == "bf16" else 4.0
    on_host = plan.offload == "all"
    sharded = plan.shard > 1 or plan.precision == "bf16" or on_host
    block = profile.block.parameters_on_device(plan.tensor)
    outside = parameters - stage.blocks * block
    trained = trained_at(profile, plan, stage, system)
    trains = profile.frozen is None and system.trains_weights
    block_trained = block if trains else profile.block.trained_parameters
    step_copies = system.step_copy_bytes * trained / plan.shard
    if plan.offload != "none":
        step_copies = 0.0
    # -- activations
    tokens = rows * profile.sequence_length
    elements = tokens * profile.logits_per_token / plan.tensor if stage.has_last else 0.0
    everything, boundary, partial = (rows * one for one in _block_bytes_per_row(profile, plan, system))
    first, next_to_last, last = _kept_of_ends(plan, stage.blocks, everything, boundary, partial)
    recomputed = stage.blocks if plan.recompute in ("full", "selective") else 0
    if isinstance(plan.recompute, int):
        recomputed = min(stage.blocks, plan.recompute)
    all_kept = (recomputed * first + (stage.blocks - recomputed) * everything) * stage.in_flight
    if stage.has_last:
        all_kept += rows * _outside_bytes_per_row(profile, plan, system)
    results, loss, of_logits = _in_loss(profile, plan, system, stage, elements, computed)
    # -- parameters and gradients on their way
    stays = not plan.gathers_in_turn
    gathered = ahead = travelling = 0.0
    whole_until_last = plan.micro_batches > 1 and (plan.shard == 1 or system.keeps_whole_gradients(plan))
    first_unit, last_unit = system.outer_units(plan, profile)
    rest = outside - first_unit - last_unit
    if sharded:
        gathered = computed * (parameters if stays else rest)
        ahead = 0.0 if stays else computed * block
        if profile.frozen is not None and profile.frozen.is_packed:
            is_gathered = plan.shard > 1 or on_host
            as_kept = profile.frozen.block_bytes * (block - block_trained) if is_gathered else 0.0
            gathered_block = as_kept + computed * block_trained
            gathered = computed * rest + (stage.blocks * gathered_block if stays else 0.0)
            ahead = 0.0 if stays else gathered_block
        travelling = 0.0 if whole_until_last else 4.0 * block_trained
    # Buckets stay from step to step (on one device this is too much), shards from the micro-batch before.
    present = gradients if not sharded or plan.micro_batches > 1 else 0.0
    if whole_until_last:
        present = system.gradient_bytes * trained
    of_first, of_last = (first_unit, last_unit) if trains else (0.0, 0.0)
    outside_trained = trained - stage.blocks * block_trained - of_first - of_last
    outside_travelling = 4.0 * outside_trained if sharded else 0.0  # where the gathered weights were
    last_part = profile.last
    of_head = last_part.parameters_on_device(plan.tensor) if profile.frozen is None else last_part.trained_parameters
    head = computed * of_head if stage.has_last and sharded and not last_unit else 0.0  # a unit's are reduced at once
    at_end = present if whole_until_last else gradients
    own = computed * block_trained if sharded else 0.0
    busy = gathered + 2.0 * ahead + travelling + head + _unpacked_bytes(profile, plan, computed)
    after_first = all_kept - last
    moments = [
        (all_kept, results + loss, gathered + (computed * last_unit or ahead), present),
        (after_first + everything - next_to_last, results, busy, present),
        (max(0.0, after_first - next_to_last), results, busy + own, present),
        (everything, results, busy, at_end),
        (0.0, results, busy + own, at_end),
        (0.0, results, gathered + outside_travelling, at_end),
        (0.0, 0.0, step_copies, gradients),
    ]
    if last_unit:
        # what arrives is dropped before the next block is gathered ahead
        beside = max(computed * last_unit, ahead + computed * of_last)
        moments += [
            (all_kept, results + of_logits, gathered + computed * last_unit + beside, present),
            (all_kept, results, gathered + ahead + (computed + 4.0) * of_last, present),
            (all_kept + everything - last, results, gathered + 2.0 * ahead + own + 4.0 * of_last, present),
        ]
    if first_unit:
        moments += [
            (everything, results, busy + computed * first_unit, at_end),
            (0.0, results, gathered + travelling + computed * (first_unit + of_first), at_end),
            (0.0, results, gathered + (computed + 4.0) * of_first, at_end),
        ]
    if on_host:
        shared = profile.tied_parameters if trains else 0.0
        parts = Parts(
            computed=computed,
            block=ahead,
            block_trained=block_trained,
            blocks=stage.blocks,
            rest=gathered,
            rest_trained=outside_trained,
            first_unit=first_unit,
            last_unit=last_unit,
            units_trained=of_first + of_last > 0.0,
            made_twice=shared,
            waiting=head + computed * shared,
            all_kept=all_kept,
            everything=everything,
            after_first=after_first,
            next_to_last=next_to_last,
            last=last,
            closing=computed * _closing_elements(profile, tokens, trains),
            norm=tokens * profile.hidden * (_OF_NORM * system.norm_kept_bytes + computed),
            results=results,
            loss=loss,
            of_logits=of_logits,
            unpacked=_unpacked_bytes(profile, plan, computed),
        )
        moments = moments_on_host(parts, plan)
    activations, logits, temporary, there = max(moments, key=sum)
    room = max(0.0, gradients - there)
    for_others = max(0.0, room - temporary)
    for_logits = max(0.0, for_others - activations)
    return max(0.0, activations - for_others), max(0.0, logits - for_logits), max(0.0, temporary - room)


def _in_loss(
    profile: ModelProfile, plan: Plan, system: TrainingSystem, stage: StagePosition, elements: float, computed: float
) -> tuple[float, float, float]:
    """Returns the bytes of logits that stay as results, of what the loss makes of them, and of what its backward gives.

    A script that computes the loss itself gives the gradients of all results to the backward, which keeps them to its
    end. With micro-batches each of these computes its logits once more in the backward.

    Args:
        profile: The model.
        plan: The plan.
        system: The program's habits.
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
            return 2.0 * results, again, again
        copies = max(0.0, whole * (kept_for_loss + in_backward) - results)
        return 2.0 * results, max(copies, again), again
    if system.takes_logits_in_chunks(plan, profile.logits_per_token, elements):
        kept_for_loss, in_backward = 0.0 if is_result else computed, computed  # what the loss keeps are the results
    in_loss = stage.in_flight if plan.schedule == "gpipe" else 1.0
    return results, elements * (kept_for_loss * in_loss + in_backward), elements * computed


def _closing_elements(profile: ModelProfile, tokens: float, trains: bool) -> float:
    """Returns the elements of the gradients that the largest of a block's closing products makes first.

    These are of its input, and of its weights where they are trained.
    """
    closing = [one for one in profile.block.products if one.split == "inner"]
    largest = max(closing, key=lambda one: one.inner * one.outer * one.copies, default=None)
    if largest is None:
        return 0.0
    of_weights = largest.inner * largest.outer * largest.copies if trains else 0.0
    return tokens * largest.inner * largest.share + of_weights


def _unpacked_bytes(profile: ModelProfile, plan: Plan, computed: float) -> float:
    """Returns the bytes of the largest matrix of a block where weights are unpacked for each product."""
    if profile.frozen is None or not profile.frozen.is_packed:
        return 0.0
    sizes = [one.inner * one.outer / (plan.tensor if one.split else 1) for one in profile.block.products]
    return computed * max(sizes, default=0.0)


def _block_bytes_per_row(profile: ModelProfile, plan: Plan, system: TrainingSystem) -> tuple[float, float, float]:
    """Returns what a block keeps of one row: everything, what it was given, and under selective recomputation."""
    wide = 1.0 if plan.precision == "bf16" else 2.0
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
    wide = 1.0 if plan.precision == "bf16" else 2.0
    whole = profile.sequence_length / plan.tensor if plan.sequence_parallel else profile.sequence_length
    return profile.last.kept_bytes_per_row(profile.sequence_length, plan.tensor, plan.sequence_parallel) * wide + (
        system.norm_kept_bytes * profile.hidden * whole
    )
