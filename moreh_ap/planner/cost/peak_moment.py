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

from typing import NamedTuple

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.activation_bytes import KeptActivations, LogitBytes, kept_activations, logit_bytes
from moreh_ap.planner.cost.host_memory_moments import Moment, Parts, moments_on_host
from moreh_ap.planner.cost.stage_positions import StagePosition, trained_at
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["peak_moment"]

_OF_NORM = 6.0
"""What a norm has in its backward, in what it keeps (`TrainingSystem.norm_kept_bytes`): that, and five results in
float32. Source: autograd of `LlamaRMSNorm`, transformers/models/llama/modeling_llama.py."""


class _Moving(NamedTuple):
    """Parameters and gradients that a device gathers, sums and drops in a step, beside its state.

    Attributes:
        first_unit: Parameter elements of the first layers, if they are a unit of their own (`F`).
        last_unit: Parameter elements of the last layers, if they are a unit of their own (`H`).
        of_first: Those of them that get gradients.
        of_last: Those of them that get gradients.
        block_trained: Parameter elements of a block that get gradients.
        rest_trained: Parameter elements outside of blocks and units that get gradients.
        gathered: Bytes of gathered parameters that stay through the backward (`R`, or all).
        ahead: Bytes of a gathered block (`B`).
        travelling: Bytes of a block's gradients on their way to the other devices.
        rest_travelling: The same of the gradients outside of blocks and units.
        head: Bytes of gradients of last layers that are no unit, and wait for the others outside of blocks.
        own: Bytes of a block's gradients before they are sent.
        unpacked: Bytes of a packed matrix while it is unpacked.
        at_begin: Bytes of gradients that are there when the backward begins.
        at_end: Bytes of gradients that are there when it ends.
    """

    first_unit: float
    last_unit: float
    of_first: float
    of_last: float
    block_trained: float
    rest_trained: float
    gathered: float
    ahead: float
    travelling: float
    rest_travelling: float
    head: float
    own: float
    unpacked: float
    at_begin: float
    at_end: float

    @property
    def busy(self) -> float:
        """Bytes beside the activations in the middle of the backward: [Note: moments], 2 and 3."""
        return self.gathered + 2.0 * self.ahead + self.travelling + self.head + self.unpacked


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

    Args:
        profile: The model.
        plan: How it is spread.
        rows: Rows of a micro-batch.
        system: How the program executes plans.
        stage: The position in the pipeline.
        parameters: Parameter elements at this position, before they are sharded.
        gradients: Bytes of gradients that `memory_footprint.py` counts as state of the device.
    """
    computed = plan.bytes_per_value
    tokens = rows * profile.sequence_length
    elements = tokens * profile.logits_per_token / plan.tensor if stage.has_last else 0.0
    kept = kept_activations(profile, plan, rows, system, stage)
    logits = logit_bytes(profile, plan, system, stage, elements, computed)
    moving = _moving(profile, plan, system, stage, parameters, gradients, computed)
    if plan.offload == "all":
        closing = computed * _closing_elements(profile, tokens, _trains(profile, system))
        norm = tokens * profile.hidden * (_OF_NORM * system.norm_kept_bytes + computed)
        made_twice = profile.tied_parameters if _trains(profile, system) else 0.0
        parts = _on_host(kept, logits, moving, stage.blocks, computed, made_twice, closing, norm)
        moments = moments_on_host(parts, plan)
    else:
        trained = trained_at(profile, plan, stage, system)
        step_copies = system.step_copy_bytes * trained / plan.shard if plan.offload == "none" else 0.0
        moments = [
            *_moments(kept, logits, moving, computed),
            (0.0, 0.0, step_copies, gradients),
            *_moments_of_units(kept, logits, moving, computed),
        ]
    activations, of_logits, temporary, there = max(moments, key=sum)
    room = max(0.0, gradients - there)
    for_others = max(0.0, room - temporary)
    for_logits = max(0.0, for_others - activations)
    return max(0.0, activations - for_others), max(0.0, of_logits - for_logits), max(0.0, temporary - room)


def _trains(profile: ModelProfile, system: TrainingSystem) -> bool:
    """Returns whether all weights are trained."""
    return profile.frozen is None and system.trains_weights


def _moving(
    profile: ModelProfile,
    plan: Plan,
    system: TrainingSystem,
    stage: StagePosition,
    parameters: float,
    gradients: float,
    computed: float,
) -> _Moving:
    """Returns the parameters and gradients that a step moves; `computed` bytes a value, otherwise as `peak_moment`."""
    is_sharded = plan.shard > 1 or plan.precision == "bf16" or plan.offload == "all"
    trained = trained_at(profile, plan, stage, system)
    block = profile.block.parameters_on_device(plan.tensor)
    block_trained = block if _trains(profile, system) else profile.block.trained_parameters
    first_unit, last_unit = system.outer_units(plan, profile)
    of_first, of_last = (first_unit, last_unit) if _trains(profile, system) else (0.0, 0.0)
    rest_trained = trained - stage.blocks * block_trained - of_first - of_last
    keeps_whole = plan.micro_batches > 1 and (plan.shard == 1 or system.keeps_whole_gradients(plan))
    # Buckets stay from step to step (on one device this is too much), shards from the micro-batch before.
    at_begin = gradients if not is_sharded or plan.micro_batches > 1 else 0.0
    if keeps_whole:
        at_begin = system.gradient_bytes * trained
    gathered = ahead = head = 0.0
    if is_sharded:
        rest = parameters - stage.blocks * block - first_unit - last_unit
        gathered, ahead = _gathered(profile, plan, stage, parameters, rest, block_trained, computed)
        if stage.has_last and not last_unit:  # the gradients of a unit are reduced at once
            head = computed * _head_elements(profile, plan)
    return _Moving(
        first_unit=first_unit,
        last_unit=last_unit,
        of_first=of_first,
        of_last=of_last,
        block_trained=block_trained,
        rest_trained=rest_trained,
        gathered=gathered,
        ahead=ahead,
        travelling=4.0 * block_trained if is_sharded and not keeps_whole else 0.0,
        rest_travelling=4.0 * rest_trained if is_sharded else 0.0,  # where the gathered weights were
        head=head,
        own=computed * block_trained if is_sharded else 0.0,
        unpacked=_unpacked_bytes(profile, plan, computed),
        at_begin=at_begin,
        at_end=at_begin if keeps_whole else gradients,
    )


def _gathered(
    profile: ModelProfile,
    plan: Plan,
    stage: StagePosition,
    parameters: float,
    rest: float,
    block_trained: float,
    computed: float,
) -> tuple[float, float]:
    """Returns the bytes of gathered parameters that stay through the backward, and those of a block that is gathered.

    Args:
        profile: The model.
        plan: How it is spread.
        stage: The position in the pipeline.
        parameters: Parameter elements at this position.
        rest: Those outside of blocks and units.
        block_trained: Those of a block that get gradients.
        computed: Bytes of a value in the precision of the computation.
    """
    in_turn = plan.gathers_in_turn
    block = profile.block.parameters_on_device(plan.tensor)
    if profile.frozen is None or not profile.frozen.is_packed:
        return (computed * rest, computed * block) if in_turn else (computed * parameters, 0.0)
    is_gathered = plan.shard > 1 or plan.offload == "all"
    as_kept = profile.frozen.block_bytes * (block - block_trained) if is_gathered else 0.0
    of_block = as_kept + computed * block_trained
    return (computed * rest, of_block) if in_turn else (computed * rest + stage.blocks * of_block, 0.0)


def _head_elements(profile: ModelProfile, plan: Plan) -> float:
    """Returns the parameter elements of the last layers that get gradients."""
    return profile.last.parameters_on_device(plan.tensor) if profile.frozen is None else profile.last.trained_parameters


def _moments(kept: KeptActivations, logits: LogitBytes, moving: _Moving, computed: float) -> list[Moment]:
    """Returns moments 1 to 4 of [Note: moments]; where last layers are a unit, it is gathered in the first."""
    results, gathered, busy, at_end = logits.results, moving.gathered, moving.busy, moving.at_end
    after_first = kept.total - kept.last
    in_loss = gathered + (computed * moving.last_unit or moving.ahead)
    return [
        (kept.total, results + logits.loss, in_loss, moving.at_begin),
        (after_first + kept.of_block - kept.next_to_last, results, busy, moving.at_begin),
        (max(0.0, after_first - kept.next_to_last), results, busy + moving.own, moving.at_begin),
        (kept.of_block, results, busy, at_end),
        (0.0, results, busy + moving.own, at_end),
        (0.0, results, gathered + moving.rest_travelling, at_end),
    ]


def _moments_of_units(kept: KeptActivations, logits: LogitBytes, moving: _Moving, computed: float) -> list[Moment]:
    """Returns the moments at which first and last layers that are units of their own are gathered and reduced."""
    results, gathered, ahead = logits.results, moving.gathered, moving.ahead
    first, last, of_first, of_last = moving.first_unit, moving.last_unit, moving.of_first, moving.of_last
    moments: list[Moment] = []
    if last:
        # The buffer in which the unit arrives is dropped before the next block is gathered ahead.
        beside = max(computed * last, ahead + computed * of_last)
        in_block = gathered + 2.0 * ahead + moving.own + 4.0 * of_last
        moments += [
            (kept.total, results + logits.gradients, gathered + computed * last + beside, moving.at_begin),
            (kept.total, results, gathered + ahead + (computed + 4.0) * of_last, moving.at_begin),
            (kept.total + kept.of_block - kept.last, results, in_block, moving.at_begin),
        ]
    if first:
        moments += [
            (kept.of_block, results, moving.busy + computed * first, moving.at_end),
            (0.0, results, gathered + moving.travelling + computed * (first + of_first), moving.at_end),
            (0.0, results, gathered + (computed + 4.0) * of_first, moving.at_end),
        ]
    return moments


def _on_host(
    kept: KeptActivations,
    logits: LogitBytes,
    moving: _Moving,
    blocks: int,
    computed: float,
    made_twice: float,
    closing: float,
    norm: float,
) -> Parts:
    """Returns what `moments_on_host` asks for; arguments as the attributes of `Parts`."""
    return Parts(
        computed=computed,
        block=moving.ahead,
        block_trained=moving.block_trained,
        blocks=blocks,
        rest=moving.gathered,
        rest_trained=moving.rest_trained,
        first_unit=moving.first_unit,
        last_unit=moving.last_unit,
        units_trained=moving.of_first + moving.of_last > 0.0,
        made_twice=made_twice,
        waiting=moving.head + computed * made_twice,
        all_kept=kept.total,
        everything=kept.of_block,
        after_first=kept.total - kept.last,
        next_to_last=kept.next_to_last,
        last=kept.last,
        closing=closing,
        norm=norm,
        results=logits.results,
        loss=logits.loss,
        of_logits=logits.gradients,
        unpacked=moving.unpacked,
    )


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
