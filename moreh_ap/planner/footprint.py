"""How many bytes the fullest device holds under a plan, by what they are for.

Decides the memory formula: what is allocated at each peak of a step, and what the allocator reserves for it. Must not
know architectures, devices or seconds.

[Note: peaks]
State is there all the time. On top of it come, one after another: the activations of the micro-batches that are under
way, with the logits of one and the gradients of one block in the computation's precision (the peak of forward and
backward); and the copies that the optimizer's step makes (the peak of the step). The larger of the two counts.

[Note: moments]
Where a step begins without gradients (`Practice.gradients_come`), they come block by block as activations go, and
there are five moments at which a device may be fullest. With activations `A`, of which a block keeps `K`, and `E` more
of a block that is computed again; a block's parameters `B` and those outside of blocks `R`, in the computation's
precision; and `4B` for a block's gradients in float32 on their way to the other devices:

1. the loss, or the begin of the backward: A, the logits and what the loss makes of them, R and the next block gathered;
2. the backward of the last block but one, when the gradients of the last are on their way: A - K + E, the results,
   R, the block, the one gathered ahead, 4B; or, at the end of that block, its gradients instead of its activations;
3. the same in the first block, with all gradients but its own and only its own activations;
4. the gradients of what is outside of blocks on their way, with all others;
5. the optimizer's step.

Between 2 and 3 everything grows or shrinks evenly. Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
(`post_backward` keeps the last block's reduced buffer until the next one's), and `scripts/check_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.occupancy import Holding, holdings, parameters_at
from moreh_ap.planner.practice import MOREH_AP, Practice
from moreh_ap.planner.profile import ModelProfile, PartProfile

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device at its peak, by what they hold.

    Attributes:
        parameter_bytes: Weights, in every precision in which they are always there.
        gradient_bytes: Gradient sums and the buckets that are handed over.
        optimizer_bytes: State of the optimizer.
        activation_bytes: What is kept for the backward.
        logit_bytes: Logits and what the loss makes of them.
        temporary_bytes: Gathered blocks, gradients on their way, copies.
        fragmentation_bytes: What the allocator holds beyond all of that.
        position: Place along the pipeline where this is so, from 0.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    logit_bytes: float
    temporary_bytes: float
    fragmentation_bytes: float
    position: int = 0

    @cached_property
    def allocated_bytes(self) -> float:
        """Bytes in use at the peak."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.logit_bytes
            + self.temporary_bytes
        )

    def scaled(self, factor: float) -> MemoryEstimate:
        """Returns the same with every part so many times as large."""
        parts = {one.name: getattr(self, one.name) * factor for one in fields(self) if one.name.endswith("_bytes")}
        return replace(self, **parts)

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator holds: what decides whether a plan fits."""
        return self.allocated_bytes + self.fragmentation_bytes


def estimate_memory(
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    practice: Practice = MOREH_AP,
    coefficients: Coefficients = COEFFICIENTS,
    position: int | None = None,
) -> MemoryEstimate:
    """Returns what the fullest device holds at the peak of a training step. See [Note: peaks].

    Args:
        profile: The model.
        plan: How it is spread.
        global_batch: Rows of a step.
        practice: How the program keeps state.
        coefficients: Constants of allocators.
        position: A place along the pipeline, to ask about it instead of the fullest.
    """
    rows = plan.rows_per_micro_batch(global_batch)
    here, fullest = 0, None
    for holding in holdings(profile, plan, practice):
        if position is None or here <= position < here + holding.count:
            found = _at(profile, plan, rows, practice, coefficients, holding, here)
            if fullest is None or found.reserved_bytes > fullest.reserved_bytes:
                fullest = found
        here += holding.count
    if fullest is None:
        raise PlanError(f"plan={str(plan)!r} has no position {position}", f"0 to {plan.pipeline - 1}")
    return fullest


def _at(
    profile: ModelProfile,
    plan: Plan,
    rows: int,
    practice: Practice,
    coefficients: Coefficients,
    holding: Holding,
    position: int,
) -> MemoryEstimate:
    """Returns what a device at one position of the pipeline holds."""
    tensor, sharing = plan.tensor, plan.data_parallel
    wide = 1.0 if plan.precision == "bf16" else 2.0
    parameters = parameters_at(profile, plan, holding)
    # what is left on a device of each kind of state
    zero = practice.zero_stage
    by_plan = parameters / plan.shard
    by_zero = parameters / sharing
    weights = practice.weight_bytes * (by_zero if zero >= 3 else by_plan)
    masters = practice.master_bytes * (by_zero if zero >= 1 else by_plan)
    gradients = practice.gradient_bytes * (by_zero if zero >= 2 else by_plan)
    buckets = practice.bucket_bytes * by_plan if sharing > 1 else 0.0
    moments = practice.optimizer_bytes * (by_zero if zero >= 1 else by_plan)
    if plan.offload == "optimizer":
        moments = 0.0
    if not practice.trains_weights:
        gradients = buckets = moments = 0.0
    step_copies = 0.0
    if practice.gather_copies and zero >= 1 and sharing > 1:
        step_copies = 2.0 * (by_plan + by_zero)
    gathered = 0.0
    if practice.gathers_blocks and (plan.shard > 1 or plan.precision == "bf16"):
        one_block = 2.0 * wide * profile.block.parameters_on_device(tensor)
        if practice.keeps_gathered and (plan.shard == 1 or plan.pipeline > 1):
            gathered = 2.0 * wide * parameters + one_block
        else:  # the block that computes, the one gathered ahead, and one block's gradients before they are reduced
            gathered = 3.0 * one_block
        if plan.micro_batches > 1 and plan.shard > 1 and not practice.reduces_every_micro_batch:
            gradients += practice.gradient_bytes * parameters
    kept = _kept_bytes_per_row(profile, plan, practice, holding) * wide
    whole = practice.boundary_kept if plan.pipeline > 1 else 0.0
    if plan.tensor > 1:
        whole += holding.blocks * practice.gathered_kept * (1.0 - 1.0 / tensor)
    kept += whole * profile.hidden * profile.sequence_length
    activations = kept * rows * holding.under_way
    logits = 0.0
    if holding.has_last:
        elements = rows * profile.sequence_length * profile.logits_per_token / tensor
        in_loss = holding.under_way if plan.schedule == "gpipe" else 1.0
        left = practice.logits_left_bytes if plan.micro_batches > 1 else 0.0
        logits = elements * (practice.logits_kept_bytes * in_loss + practice.logits_peak_bytes + left)
    if practice.gradients_come:
        activations, logits, gathered = _fullest_moment(profile, plan, rows, practice, holding, parameters, gradients)
    transient = activations + logits + gathered
    temporary, peak_activations, peak_logits = gathered, activations, logits
    if step_copies > transient:
        temporary, peak_activations, peak_logits = step_copies, 0.0, 0.0
    fragmentation = coefficients.reserved_bytes + coefficients.fragmentation * max(transient, step_copies)
    return MemoryEstimate(
        parameter_bytes=weights + masters,
        gradient_bytes=gradients + buckets,
        optimizer_bytes=moments,
        activation_bytes=peak_activations,
        logit_bytes=peak_logits,
        temporary_bytes=temporary,
        fragmentation_bytes=fragmentation,
        position=position,
    )


def _fullest_moment(
    profile: ModelProfile,
    plan: Plan,
    rows: int,
    practice: Practice,
    holding: Holding,
    parameters: float,
    gradients: float,
) -> tuple[float, float, float]:
    """Returns activations, logits and temporary bytes at the fullest of [Note: moments].

    Gradients that are not there yet leave room: it is taken off the temporary bytes, then off the others.
    """
    computed = 2.0 if plan.precision == "bf16" else 4.0
    sharded = plan.shard > 1 or plan.precision == "bf16"
    block = profile.block.parameters_on_device(plan.tensor)
    outside = parameters - holding.blocks * block
    step_copies = 0.0 if plan.offload == "optimizer" else practice.step_copy_bytes * parameters / plan.shard
    # -- activations
    tokens = rows * profile.sequence_length
    elements = tokens * profile.logits_per_token / plan.tensor if holding.has_last else 0.0
    everything, boundary, partial = (rows * one for one in _block_bytes_per_row(profile, plan, practice))
    first, next_to_last, last = _kept_of_ends(plan, holding.blocks, everything, boundary, partial)
    recomputed = holding.blocks if plan.recompute in ("full", "selective") else 0
    if isinstance(plan.recompute, int):
        recomputed = min(holding.blocks, plan.recompute)
    all_kept = (recomputed * first + (holding.blocks - recomputed) * everything) * holding.under_way
    if holding.has_last:
        all_kept += rows * _outside_bytes_per_row(profile, plan, practice)
    results = elements * practice.logits_out_bytes * plan.micro_batches
    in_loss = holding.under_way if plan.schedule == "gpipe" else 1.0
    loss = elements * (practice.logits_kept_bytes * in_loss + practice.logits_peak_bytes)
    # -- parameters and gradients on their way
    stays = plan.shard == 1 or plan.pipeline > 1
    gathered = ahead = travelling = 0.0
    whole_until_last = plan.micro_batches > 1
    if sharded:
        gathered = computed * (parameters if stays else outside)
        ahead = 0.0 if stays else computed * block
        travelling = 0.0 if whole_until_last else 4.0 * block
    present = 0.0 if sharded else gradients  # buckets stay from step to step; on one device this is too much
    if whole_until_last:
        present = practice.gradient_bytes * parameters
    head = computed * profile.last.parameters_on_device(plan.tensor) if holding.has_last and sharded else 0.0
    at_end = present if whole_until_last else gradients
    own = computed * block if sharded else 0.0
    busy = gathered + 2.0 * ahead + travelling + head
    after_first = all_kept - last
    moments = [
        (all_kept, results + loss, gathered + ahead, present),
        (after_first + everything - next_to_last, results, busy, present),
        (max(0.0, after_first - next_to_last), results, busy + own, present),
        (everything, results, busy, at_end),
        (0.0, results, busy + own, at_end),
        (0.0, results, gathered + 4.0 * outside * sharded, at_end),  # gradients where the gathered weights were
        (0.0, 0.0, step_copies, gradients),
    ]
    activations, logits, temporary, there = max(moments, key=sum)
    room = max(0.0, gradients - there)
    for_others = max(0.0, room - temporary)
    for_logits = max(0.0, for_others - activations)
    return max(0.0, activations - for_others), max(0.0, logits - for_logits), max(0.0, temporary - room)


def _kept_bytes_per_row(profile: ModelProfile, plan: Plan, practice: Practice, holding: Holding) -> float:
    """Returns what one row of one micro-batch keeps on a device until its backward, in 16-bit values."""
    length, tensor = profile.sequence_length, plan.tensor
    whole = 1.0 / tensor if plan.sequence_parallel else 1.0
    boundary = profile.boundary_bytes_per_row * whole
    block = profile.block
    everything = _part_bytes_per_row(block, plan, length) * practice.kept_part
    if not practice.fused_attention:
        everything += block.score_bytes_per_row / tensor
    selective = length * (
        block.selective_split_bytes_per_token / tensor + block.selective_whole_bytes_per_token * whole
    )
    if plan.recompute == "none":
        kept = holding.blocks * everything
    elif plan.recompute == "selective":
        kept = holding.blocks * selective
    else:
        count = holding.blocks if plan.recompute == "full" else min(holding.blocks, int(plan.recompute))
        kept = count * boundary + (holding.blocks - count) * everything
        if count:
            kept += everything / max(1.0, holding.under_way)  # of the block that is being computed again
    if holding.has_last:
        kept += _part_bytes_per_row(profile.last, plan, length) / max(1.0, holding.under_way)
    return kept


def _part_bytes_per_row(part: PartProfile, plan: Plan, length: int) -> float:
    whole = 1.0 / plan.tensor if plan.sequence_parallel else 1.0
    return length * (part.kept_split_bytes_per_token / plan.tensor + part.kept_whole_bytes_per_token * whole)


def _block_bytes_per_row(profile: ModelProfile, plan: Plan, practice: Practice) -> tuple[float, float, float]:
    """Returns what a block keeps of one row: everything, what it was given, and under selective recomputation."""
    wide = 1.0 if plan.precision == "bf16" else 2.0
    block, length = profile.block, profile.sequence_length
    whole = length / plan.tensor if plan.sequence_parallel else length
    split = block.kept_split_bytes_per_token
    if not practice.rotation_kept and block.attention_width:
        queries = block.attention_flops_per_row / (2.0 * length * length)
        split -= block.products[0].outer + queries  # 2 bytes of each query and key
    everything = wide * (split * length / plan.tensor + block.kept_whole_bytes_per_token * whole)
    everything += 2.0 * practice.norm_kept_bytes * profile.hidden * whole
    everything += wide * practice.gathered_kept * profile.hidden * (length - whole)  # whole inputs of split products
    partial = block.selective_split_bytes_per_token * length / plan.tensor
    partial += block.selective_whole_bytes_per_token * whole + practice.selective_kept_bytes * profile.hidden * length
    return everything, wide * 2.0 * profile.hidden * whole, wide * partial


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


def _outside_bytes_per_row(profile: ModelProfile, plan: Plan, practice: Practice) -> float:
    """Returns what the part after the blocks keeps of one row."""
    wide = 1.0 if plan.precision == "bf16" else 2.0
    whole = profile.sequence_length / plan.tensor if plan.sequence_parallel else profile.sequence_length
    return _part_bytes_per_row(profile.last, plan, profile.sequence_length) * wide + (
        practice.norm_kept_bytes * profile.hidden * whole
    )
