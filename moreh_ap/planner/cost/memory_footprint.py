"""The memory footprint of a plan: bytes on the fullest device, by what they are for.

Decides the memory formula: what is allocated at each peak of a step, and what the allocator reserves for it. Must not
know architectures, devices or seconds.

[Note: peaks]
State is always there. On top of it come, one after another: the activations of the micro-batches that are under
way, with the logits of one and the gradients of one block in the computation's precision (the peak of forward and
backward); and the copies that the optimizer's step makes (the peak of the step). The larger of the two counts.

Where a step begins without gradients, the second is found moment by moment (`peak_moment.py`).

[Note: host memory]
State that a plan offloads is in host memory instead. With `offload=all` parameters and gradients are, too, in pinned
memory, of which PyTorch hands out powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.peak_moment import peak_moment
from moreh_ap.planner.cost.stage_positions import StagePosition, frozen_at, parameters_at, positions_of, trained_at
from moreh_ap.planner.cost.training_systems import MOREH_AP, TrainingSystem
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, ModelProfile

__all__ = ["MemoryEstimate", "estimate_memory"]


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device at its peak, by what they hold.

    Attributes:
        parameter_bytes: Weights, in every precision in which they are always there.
        gradient_bytes: Gradient sums and the buckets that are handed over.
        optimizer_bytes: State of the optimizer.
        activation_bytes: Activations kept for the backward.
        logit_bytes: Logits and the intermediate results of the loss.
        temporary_bytes: Gathered blocks, gradients in flight, copies.
        fragmentation_bytes: Bytes that the allocator reserves beyond all of that.
        position: Place along the pipeline where this is so, from 0.
        host_bytes: Bytes that the device's worker has in host memory of what a plan offloads, beside all of these.
    """

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    logit_bytes: float
    temporary_bytes: float
    fragmentation_bytes: float
    position: int = 0
    host_bytes: float = 0.0

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

    @property
    def components(self) -> list[tuple[str, float]]:
        """The parts of the reserved bytes: labels and bytes, in the order of a bar."""
        return [
            ("parameters", self.parameter_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activation_bytes),
            ("logits", self.logit_bytes),
            ("temporary", self.temporary_bytes),
            ("fragmentation", self.fragmentation_bytes),
        ]

    def scaled(self, factor: float) -> MemoryEstimate:
        """Returns the same with every component on the device `factor` times as large."""
        parts = {one.name: getattr(self, one.name) * factor for one in fields(self) if one.name.endswith("_bytes")}
        return replace(self, **{**parts, "host_bytes": self.host_bytes})

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator reserves; they decide whether a plan fits."""
        return self.allocated_bytes + self.fragmentation_bytes


def estimate_memory(
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    system: TrainingSystem = MOREH_AP,
    coefficients: Coefficients = COEFFICIENTS,
    position: int | None = None,
) -> MemoryEstimate:
    """Returns what the fullest device holds at the peak of a training step. See [Note: peaks].

    Args:
        profile: The model.
        plan: How it is spread.
        global_batch: Rows of a step.
        system: How the program keeps state.
        coefficients: Constants of allocators.
        position: A place along the pipeline, to ask about it instead of the fullest.
    """
    rows = plan.rows_per_micro_batch(global_batch)
    here, fullest = 0, None
    for stage in positions_of(profile, plan, system):
        if position is None or here <= position < here + stage.count:
            found = _at(profile, plan, rows, system, coefficients, stage, here)
            if fullest is None or found.reserved_bytes > fullest.reserved_bytes:
                fullest = found
        here += stage.count
    if fullest is None:
        raise PlanError(f"plan={str(plan)!r} has no position {position}", f"0 to {plan.pipeline - 1}")
    return fullest


def _at(
    profile: ModelProfile,
    plan: Plan,
    rows: int,
    system: TrainingSystem,
    coefficients: Coefficients,
    stage: StagePosition,
    position: int,
) -> MemoryEstimate:
    """Returns what a device at one position of the pipeline holds."""
    sharing = plan.data_parallel
    parameters = parameters_at(profile, plan, stage)
    # a device's shard of each kind of state
    zero = system.zero_stage
    frozen = frozen_at(profile, plan, stage, system)
    by_plan, by_zero = ((parameters - sum(frozen)) / devices for devices in (plan.shard, sharing))
    weights = system.weight_bytes * (by_zero if zero >= 3 else by_plan)
    masters = system.master_bytes * (by_zero if zero >= 1 else by_plan)
    if profile.frozen is not None:
        kept = frozen[0] * profile.frozen.block_bytes + frozen[1] * profile.frozen.outside_bytes
        weights += kept / plan.shard + frozen[0] * profile.frozen.constant_bytes
    trained = trained_at(profile, plan, stage, system)
    by_plan, by_zero = trained / plan.shard, trained / sharing
    gradients = system.gradient_bytes * (by_zero if zero >= 2 else by_plan)
    buckets = system.bucket_bytes * by_plan if sharing > 1 else 0.0
    moments = system.optimizer_bytes * (by_zero if zero >= 1 else by_plan)
    on_host = 0.0
    if plan.offload != "none":
        on_host, moments = moments, 0.0
    step_copies = 0.0
    if system.gather_copies and zero >= 1 and sharing > 1:
        step_copies = 2.0 * (by_plan + by_zero)
    if system.keeps_whole_gradients(plan):
        gradients += system.gradient_bytes * trained
    if plan.offload == "all":
        constants = 0.0 if profile.frozen is None else frozen[0] * profile.frozen.constant_bytes
        on_host += coefficients.pinned * (weights - constants + masters + gradients)
        weights, masters, gradients, buckets = constants, 0.0, 0.0, 0.0
    if system.gradients_come:
        activations, logits, gathered = peak_moment(profile, plan, rows, system, stage, parameters, gradients)
    else:
        activations, logits, gathered = _all_at_once(profile, plan, rows, system, stage)
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
        host_bytes=on_host,
    )


def _all_at_once(
    profile: ModelProfile, plan: Plan, rows: int, system: TrainingSystem, stage: StagePosition
) -> tuple[float, float, float]:
    """Returns activations, logits and temporary bytes of forward and backward. See [Note: peaks]."""
    gathered = 0.0
    if system.gathers_blocks and (plan.shard > 1 or plan.precision == "bf16"):
        # the block that computes, the one gathered ahead, and one block's gradients before they are reduced
        gathered = 3.0 * plan.bytes_per_value * profile.block.parameters_on_device(plan.tensor)
    kept = _kept_bytes_per_row(profile, plan, system, stage) * plan.bytes_per_value / BYTES_PER_VALUE
    whole = system.boundary_kept if plan.pipeline > 1 else 0.0
    if plan.tensor > 1:
        whole += stage.blocks * system.gathered_kept * (1.0 - 1.0 / plan.tensor)
    kept += whole * profile.hidden * profile.sequence_length
    logits = 0.0
    if stage.has_last:
        elements = rows * profile.sequence_length * profile.logits_per_token / plan.tensor
        in_loss = stage.in_flight if plan.schedule == "gpipe" else 1.0
        left = system.logits_left_bytes if plan.micro_batches > 1 else 0.0
        logits = elements * (system.logits_kept_bytes * in_loss + system.logits_peak_bytes + left)
    return kept * rows * stage.in_flight, logits, gathered


def _kept_bytes_per_row(profile: ModelProfile, plan: Plan, system: TrainingSystem, stage: StagePosition) -> float:
    """Returns what one row of one micro-batch keeps on a device until its backward, in 16-bit values."""
    length, tensor = profile.sequence_length, plan.tensor
    whole = 1.0 / tensor if plan.sequence_parallel else 1.0
    boundary = profile.boundary_bytes_per_row * whole
    block = profile.block
    everything = block.kept_bytes_per_row(length, tensor, plan.sequence_parallel) * system.kept_fraction
    if not system.fused_attention:
        everything += block.score_bytes_per_row / tensor
    selective = length * (
        block.selective_split_bytes_per_token / tensor + block.selective_replicated_bytes_per_token * whole
    )
    if plan.recompute == "none":
        kept = stage.blocks * everything
    elif plan.recompute == "selective":
        kept = stage.blocks * selective
    else:
        count = stage.blocks if plan.recompute == "full" else min(stage.blocks, int(plan.recompute))
        kept = count * boundary + (stage.blocks - count) * everything
        if count:
            kept += everything / max(1.0, stage.in_flight)  # of the block that is being computed again
    if stage.has_last:
        kept += profile.last.kept_bytes_per_row(length, tensor, plan.sequence_parallel) / max(1.0, stage.in_flight)
    return kept
