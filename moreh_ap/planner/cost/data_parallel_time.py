"""Seconds in which data-parallel devices exchange weights and gradients, and seconds of the optimizer's step.

Decides what is exchanged how often under `replicate` and `shard`, and which part of it overlaps with computation. Must
not know how the seconds of the computation are found: they are arguments.
"""

from __future__ import annotations

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import Coefficients
from moreh_ap.planner.cost.collectives import group_of, queued_gathers_s, queued_sums_s
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.stage_positions import StagePosition, parameters_at, positions_of, trained_at
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["data_s", "optimizer_s"]


def data_s(
    profile: ModelProfile,
    plan: Plan,
    cluster: Cluster,
    system: TrainingSystem,
    coefficients: Coefficients,
    stage: StagePosition,
    computing_s: float,
    backward_s: float,
) -> tuple[float, float]:
    """Returns the seconds of gathering weights and summing gradients that show, and those that do not.

    Args:
        profile: The model.
        plan: How it is spread.
        cluster: The devices.
        system: Which exchanges the program overlaps with which computation.
        coefficients: Constants of networks.
        stage: What the slowest position of the pipeline holds.
        computing_s: What it takes for one micro-batch, all in all.
        backward_s: What it computes backward for one micro-batch.
    """
    parameters, trained = parameters_at(profile, plan, stage), trained_at(profile, plan, stage, system)
    copies_s = 0.0
    if plan.offload == "all" and not system.host_computes:
        copies_s = _copies_s(profile, plan, system, coefficients, parameters, trained)
    if plan.data_parallel == 1 or not (trained or plan.shard > 1):
        return copies_s, 0.0  # a single device gathers no unit while another one computes
    gathered = plan.bytes_per_value * parameters
    if profile.frozen is not None and profile.frozen.is_packed:
        packed = stage.blocks * (profile.block.parameters_on_device(plan.tensor) - profile.block.trained_parameters)
        gathered += packed * (profile.frozen.block_bytes - plan.bytes_per_value)
    pieces = stage.blocks + 2.0
    if plan.shard > 1:
        sharded_s = _sharded_s(profile, plan, cluster, system, pieces, gathered, trained) + copies_s
        hidden_s = min(sharded_s, plan.micro_batches * computing_s * system.hides_gathers)
        return sharded_s - hidden_s, hidden_s
    group = group_of(plan.data_parallel, plan.tensor, cluster, plan.tensor > cluster.devices_per_node)
    buckets = pieces + trained / coefficients.bucket_parameters
    travelled = system.reduced_bytes * trained
    if system.zero_stage == 0:
        sums_s, after_s = queued_sums_s(travelled, buckets, group), 0.0
        hidden_s = min(sums_s, backward_s * system.hides_gradients)
    else:
        sums_s = queued_gathers_s(travelled, buckets, group, "scatter")
        hidden_s = min(sums_s, backward_s * system.hides_scatters)
        after_s = queued_gathers_s(plan.bytes_per_value * parameters, buckets, group)
    return sums_s - hidden_s + after_s + copies_s, hidden_s


def _sharded_s(
    profile: ModelProfile,
    plan: Plan,
    cluster: Cluster,
    system: TrainingSystem,
    pieces: float,
    gathered: float,
    trained: float,
) -> float:
    """Returns the seconds in which a plan that shards gathers parameters and sums gradients, hidden or not.

    Args:
        profile: The model.
        plan: How it is spread.
        cluster: The devices.
        system: How often the program gathers and sums.
        pieces: Units of a stage that are gathered one after another, before layers that are units of their own.
        gathered: Bytes of all parameters of a stage in the precision in which they travel.
        trained: Parameter elements of a stage that get gradients.
    """
    count = plan.micro_batches
    pieces += max(0, sum(size > 0.0 for size in system.outer_units(plan, profile)) - 1)  # beside the rest
    inside = group_of(plan.shard, plan.tensor, cluster)
    uses = 2.0 * count if system.regathers_for_backward else float(count)
    if system.keeps_gathered and plan.pipeline > 1:
        uses = 1.0
    sums = 1 if system.keeps_whole_gradients(plan) else count
    sums = sums if trained else 0
    seconds = uses * queued_gathers_s(gathered, pieces, inside)
    seconds += sums * queued_gathers_s(system.reduced_bytes * trained, pieces, inside, "scatter")
    if plan.replicate > 1:
        across = group_of(plan.replicate, plan.tensor * plan.shard, cluster)
        sums = min(sums, 1) if system.sums_replicas_once and plan.offload != "all" else sums
        seconds += sums * queued_sums_s(system.reduced_bytes * trained / plan.shard, pieces, across)
    return seconds


def _copies_s(
    profile: ModelProfile,
    plan: Plan,
    system: TrainingSystem,
    coefficients: Coefficients,
    parameters: float,
    trained: float,
) -> float:
    """Returns the seconds of copying shards of parameters from host memory, and of gradients to it."""
    if profile.frozen is None:
        kept = parameters * (system.weight_bytes + system.master_bytes)
    else:
        block = profile.block
        of_blocks = profile.num_blocks * (block.parameters_on_device(plan.tensor) - block.trained_parameters)
        outside = parameters - trained - of_blocks
        kept = of_blocks * profile.frozen.block_bytes + outside * profile.frozen.outside_bytes
        kept += trained * system.master_bytes
    uses = 2.0 if system.regathers_for_backward else 1.0
    moved = plan.micro_batches * (uses * kept + system.gradient_bytes * trained) / plan.shard
    return moved / coefficients.host_bytes_per_s


def optimizer_s(
    profile: ModelProfile, plan: Plan, cluster: Cluster, system: TrainingSystem, coefficients: Coefficients
) -> float:
    """Returns the seconds of the optimizer on the fullest device: state is read and written once, bound by memory.

    State in host memory comes and goes, before and after each bucket's step (`runtime/worker/optimizer_offload.py`).
    With parameters and gradients there, too, the processors of a host step for all of its devices, and add up the
    gradients of micro-batches.
    """
    most = max(trained_at(profile, plan, stage, system) for stage in positions_of(profile, plan, system))
    if not most:
        return 0.0
    mine = most / plan.shard if system.zero_stage == 0 else most / plan.data_parallel
    moved = mine * (2.0 * (system.master_bytes + system.optimizer_bytes) + system.gradient_bytes)
    moved += most / plan.shard * system.gradient_bytes * 2.0  # the norm of the gradients, and clearing them
    if plan.offload == "all" and not system.host_computes:
        moved += (plan.micro_batches - 1) * most / plan.shard * system.gradient_bytes * 3.0
        return moved * min(plan.num_devices, cluster.devices_per_node) / coefficients.host_step_bytes_per_s
    host_s = 0.0
    if plan.offload == "optimizer":
        host_s = 2.0 * system.optimizer_bytes * mine / coefficients.host_bytes_per_s
    return host_s + moved / (cluster.device.memory_bytes_per_s * coefficients.memory)
