"""How long a training step takes under a plan, by what the time goes to.

Decides how computation, communication and waiting add up. Must not know architectures or bytes of memory.

[Note: one step]
Every position of the pipeline works through all micro-batches, forward and backward; the slowest sets the pace, and
the others' one micro-batch each is what fills and drains the pipeline. What the tensor axis sums is added to the
computation where the program does not hide it. Gradients travel beside the backward of the last micro-batch as far as
the program does that. Then the optimizer's step goes through all state in memory. Source: Narayanan et al., "Efficient
Large-Scale Language Model Training on GPU Clusters", 2021, section 3.

[Note: shared processors]
Where several devices share what computes, as CPU workers share cores, all seconds are those of a device while all the
others compute too. One that waits leaves its part to the others, so that filling and draining a pipeline takes the
fewer seconds the more devices share, but for messages between nodes, for which all wait. What starts operations is
what computes, so that neither hides the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.collectives import group_of, pipeline_messages, tensor_sum_s
from moreh_ap.planner.cost.compute_time import LayerTime, layer_time
from moreh_ap.planner.cost.data_parallel_time import data_s, optimizer_s
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.stage_positions import StagePosition, parameters_at, positions_of
from moreh_ap.planner.cost.step_estimate import StepEstimate
from moreh_ap.planner.cost.training_systems import MOREH_AP, TrainingSystem
from moreh_ap.planner.profiles.model_profile import BYTES_PER_VALUE, ModelProfile

__all__ = ["StepEstimate", "estimate_step"]


@dataclass(frozen=True)
class _TensorSum:
    """Seconds of summing one hidden state over the tensor axis: moving its bytes, starting on the network, the host."""

    moving_s: float = 0.0
    starting_s: float = 0.0
    host_s: float = 0.0


@dataclass(frozen=True)
class _Pace:
    """Seconds of one micro-batch at one position."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    recompute_s: float = 0.0
    host_s: float = 0.0
    tensor_s: float = 0.0
    tensor_hidden_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class _Pipeline:
    """Seconds of a step that go to the pipeline: sending activations, the part of it that is hidden, and the bubble."""

    sending_s: float = 0.0
    hidden_s: float = 0.0
    bubble_s: float = 0.0


def estimate_step(
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    cluster: Cluster,
    system: TrainingSystem = MOREH_AP,
    coefficients: Coefficients = COEFFICIENTS,
) -> StepEstimate:
    """Returns how long a step takes. See [Note: one step].

    Args:
        profile: The model.
        plan: How it is spread.
        global_batch: Rows of a step.
        cluster: The devices; the plan occupies the first of them.
        system: How the program executes plans.
        coefficients: Constants of devices and networks.

    Raises:
        PlanError: The plan needs more devices than there are.
    """
    if plan.num_devices > cluster.num_devices:
        raise PlanError(
            f"plan={str(plan)!r} needs {plan.num_devices} devices, the cluster has {cluster.num_devices}",
            f"replicate x shard x tensor x pipeline of at most {cluster.num_devices}",
        )
    rows = plan.rows_per_micro_batch(global_batch)
    device = cluster.device
    times = [
        layer_time(layer, rows, profile.sequence_length, plan, device, system, coefficients, logits)
        for layer, logits in ((profile.first, 0), (profile.block, 0), (profile.last, profile.logits_per_token))
    ]
    tensor_sum = _tensor_sum(_boundary_bytes(profile, plan, rows), plan, cluster, system)
    adding_s = system.accumulation_bytes / (device.memory_bytes_per_s * coefficients.memory)
    pace, others_s, slowest = _Pace(), 0.0, None
    for stage in positions_of(profile, plan, system):
        found = _pace(profile, plan, system, stage, times, tensor_sum, adding_s)
        others_s += found.total_s * stage.count
        if slowest is None or found.total_s > pace.total_s:
            pace, slowest = found, stage
    assert slowest is not None
    others_s -= pace.total_s
    count = plan.micro_batches
    pipeline = _pipeline(profile, plan, rows, cluster, system, coefficients, pace.total_s, others_s)
    shown_data_s, data_hidden_s = data_s(
        profile, plan, cluster, system, coefficients, slowest, pace.total_s, pace.backward_s
    )
    return StepEstimate(
        forward_s=count * pace.forward_s,
        backward_s=count * pace.backward_s,
        recompute_s=count * pace.recompute_s,
        host_s=count * pace.host_s,
        tensor_s=count * pace.tensor_s,
        tensor_hidden_s=count * pace.tensor_hidden_s,
        data_s=shown_data_s,
        data_hidden_s=data_hidden_s,
        pipeline_s=pipeline.sending_s,
        pipeline_hidden_s=pipeline.hidden_s,
        bubble_s=pipeline.bubble_s,
        optimizer_s=optimizer_s(profile, plan, cluster, system, coefficients),
        fixed_s=coefficients.step_s,
        tokens=float(global_batch * profile.sequence_length),
        num_devices=plan.num_devices,
        model_flops=global_batch * profile.flops_per_row,
        peak_flops=device.peak_flops(system.matrix_precision or plan.precision),
    )


def _pace(
    profile: ModelProfile,
    plan: Plan,
    system: TrainingSystem,
    stage: StagePosition,
    times: list[LayerTime],
    tensor_sum: _TensorSum,
    adding_s: float,
) -> _Pace:
    """Returns what one micro-batch takes at a position of the pipeline."""
    first, block, last = times
    blocks = stage.blocks
    forward, backward = blocks * block.forward_s, blocks * block.backward_s
    host = blocks * (block.host_forward_s + block.host_backward_s)
    sums = 2.0 * blocks * profile.block.num_tensor_sums
    if stage.has_first:
        forward, backward = forward + first.forward_s, backward + first.backward_s
        host += first.host_forward_s + first.host_backward_s
        sums += profile.first.num_tensor_sums
    if stage.has_last:
        forward, backward = forward + last.forward_s, backward + last.backward_s
        host += last.host_forward_s + last.host_backward_s
        sums += 1.0
    if system.trains_weights:
        backward += adding_s * parameters_at(profile, plan, stage)
    recompute = 0.0
    if plan.recompute != "none":
        again = blocks if isinstance(plan.recompute, str) else min(blocks, plan.recompute)
        if plan.recompute == "selective":
            recompute = system.selective_again * again * block.forward_s
        else:
            recompute = again * block.forward_s
            sums += again * profile.block.num_tensor_sums
            host += again * block.host_forward_s
    if profile.loss_outside and plan.micro_batches > 1:  # it is computed of all results, before any backward
        recompute += forward
        host += blocks * block.host_forward_s
        sums += blocks * profile.block.num_tensor_sums
    device_s = forward + backward + recompute
    talking = sums * tensor_sum.moving_s
    hidden = min(talking * system.hides_tensor, device_s)
    starting = sums * tensor_sum.starting_s
    busy = device_s + talking - hidden
    host += sums * tensor_sum.host_s
    total = (busy + host if system.host_computes else max(busy, host)) + starting
    waiting = total - busy
    return _Pace(forward, backward, recompute, waiting, talking - hidden, hidden, total)


def _pipeline(
    profile: ModelProfile,
    plan: Plan,
    rows: int,
    cluster: Cluster,
    system: TrainingSystem,
    coefficients: Coefficients,
    slowest_s: float,
    others_s: float,
) -> _Pipeline:
    """Returns what a step takes because of the pipeline.

    Args:
        profile: The model.
        plan: How it is spread.
        rows: Rows of a micro-batch.
        cluster: The devices.
        system: How the program executes plans.
        coefficients: Constants of networks.
        slowest_s: What the slowest position takes for one micro-batch.
        others_s: What the other positions take for one micro-batch each, added up.
    """
    if plan.pipeline == 1:
        return _Pipeline()
    sent = _boundary_bytes(profile, plan, rows) / (plan.tensor if plan.sequence_parallel else 1)
    messages = pipeline_messages(sent, plan.tensor * plan.data_parallel, cluster, coefficients, plan.pipeline)
    bubble_s = others_s / plan.stages_per_device * (0.4 if plan.schedule == "zero_bubble" else 1.0)
    bubble_s += 2.0 * messages.inside * messages.inside_s
    across_s = 2.0 * messages.across * messages.across_s
    sharing = cluster.device.sharing
    if sharing > 1.0:  # see [Note: shared processors]
        busy_s = plan.micro_batches * slowest_s
        bubble_s = max(0.0, (busy_s + bubble_s) / sharing + across_s - busy_s)
    else:
        bubble_s += across_s
    steady_s = 2.0 * plan.micro_batches * plan.stages_per_device * messages.slowest_s
    sending_s = steady_s * (1.0 - system.hides_pipeline)
    return _Pipeline(sending_s, steady_s - sending_s, bubble_s)


def _boundary_bytes(profile: ModelProfile, plan: Plan, rows: int) -> float:
    """Returns the bytes of the hidden states of so many rows in the plan's precision."""
    return profile.boundary_bytes_per_row * rows * plan.bytes_per_value / BYTES_PER_VALUE


def _tensor_sum(num_bytes: float, plan: Plan, cluster: Cluster, system: TrainingSystem) -> _TensorSum:
    """Returns what one sum over the tensor axis takes: a scatter and a gather, or both in one."""
    if plan.tensor == 1:
        return _TensorSum()
    group = group_of(plan.tensor, 1, cluster)
    measured_s = tensor_sum_s(num_bytes, plan.sequence_parallel, group)
    if measured_s is not None:
        return _TensorSum(moving_s=measured_s)
    crowding = cluster.inter.crowding_s * plan.tensor if cluster.num_nodes > 1 else 0.0
    return _TensorSum(
        moving_s=2.0 * num_bytes * (group.size - 1) / group.size / group.bytes_per_s,
        starting_s=2.0 * group.start_s,
        host_s=2.0 * (system.host_s_per_exchange + crowding),
    )
