"""Which blocks the stages of a pipeline hold, and how many micro-batches are in flight in them.

Decides in closed form what the schedules of `plan.SCHEDULES` imply for the first stage, a middle one and the last. Must
not know bytes or seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.training_systems import TrainingSystem
from moreh_ap.planner.profiles.model_profile import ModelProfile

__all__ = ["StagePosition", "frozen_at", "parameters_at", "positions_of", "trained_at"]


@dataclass(frozen=True)
class StagePosition:
    """The blocks of the devices at one kind of pipeline position: the stages of one device taken together.

    Attributes:
        blocks: Number of blocks on the device.
        has_first: Whether it has the part before the blocks.
        has_last: Whether it has the part after them.
        in_flight: Micro-batches whose activations it keeps at a time.
        count: How many positions are like this.
    """

    blocks: int
    has_first: bool
    has_last: bool
    in_flight: float
    count: int = 1


def positions_of(profile: ModelProfile, plan: Plan, system: TrainingSystem) -> tuple[StagePosition, ...]:
    """Returns the kinds of positions along the pipeline; their counts add up to `plan.pipeline`."""
    head_in_blocks, past = 0.0, system.partition == "past_cost"
    if system.partition != "even" and not plan.layers and plan.stages_per_device == 1:
        block = sum(one.inner * one.outer for one in profile.block.products)
        head_in_blocks = sum(one.inner * one.outer for one in profile.last.products) / block if block else 0.0
    counts = plan.layers if plan.pipeline > 1 else ()
    return _positions_of(
        profile.num_blocks, plan.pipeline, plan.stages_per_device, plan.schedule, plan.micro_batches, counts,
        head_in_blocks, past,
    )  # fmt: skip


def parameters_at(profile: ModelProfile, plan: Plan, stage: StagePosition) -> float:
    """Returns the parameter elements that a device at a position of the pipeline computes with."""
    parameters = stage.blocks * profile.block.parameters_on_device(plan.tensor)
    if stage.has_first:
        parameters += profile.first.parameters_on_device(plan.tensor)
    if stage.has_last:
        parameters += profile.last.parameters_on_device(plan.tensor)
        if profile.tied and not stage.has_first:
            parameters += profile.tied_parameters / plan.tensor
    return parameters


def trained_at(profile: ModelProfile, plan: Plan, stage: StagePosition, system: TrainingSystem) -> float:
    """Returns the parameter elements that get gradients on a device at a position of the pipeline."""
    if profile.frozen is None:
        return parameters_at(profile, plan, stage) if system.trains_weights else 0.0
    trained = stage.blocks * profile.block.trained_parameters
    trained += profile.first.trained_parameters if stage.has_first else 0.0
    return trained + (profile.last.trained_parameters if stage.has_last else 0.0)


def frozen_at(profile: ModelProfile, plan: Plan, stage: StagePosition, system: TrainingSystem) -> tuple[float, float]:
    """Returns the frozen parameter elements of blocks and outside of them on a device there, where a profile tells."""
    if profile.frozen is None:
        return 0.0, 0.0
    block = profile.block
    of_blocks = stage.blocks * (block.parameters_on_device(plan.tensor) - block.trained_parameters)
    everything = parameters_at(profile, plan, stage) - trained_at(profile, plan, stage, system)
    return of_blocks, everything - of_blocks


@lru_cache(maxsize=65536)
def _positions_of(
    num_blocks: int,
    pipeline: int,
    stages_per_device: int,
    schedule: str,
    micro_batches: int,
    layers: tuple[int, ...],
    head_in_blocks: float,
    past: bool,
) -> tuple[StagePosition, ...]:
    if pipeline == 1:
        return (StagePosition(num_blocks, True, True, 1.0),)
    if head_in_blocks:
        counts, last = _balanced_by_parameters(num_blocks, pipeline, head_in_blocks, past)
    else:
        stages = layers or _even(num_blocks, pipeline * stages_per_device)
        counts, last = [sum(stages[device::pipeline]) for device in range(pipeline)], pipeline - 1
    merged: list[StagePosition] = []
    for device, blocks in enumerate(counts):
        in_flight = _in_flight(device, pipeline, stages_per_device, schedule, micro_batches)
        here = StagePosition(blocks, device == 0, device == last, in_flight)
        same = merged and 0 < device < last and merged[-1].blocks == blocks and not merged[-1].has_first
        if same:
            before = merged[-1]
            merged[-1] = StagePosition(blocks, False, False, before.in_flight, before.count + 1)
        else:
            merged.append(here)
    return tuple(merged)


def _in_flight(device: int, pipeline: int, stages_per_device: int, schedule: str, micro_batches: int) -> float:
    """Returns of how many micro-batches a device of the pipeline keeps activations at a time.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2: all
    of them under GPipe, as many as stages follow under 1F1B, 1 + (p - 1) / (p v) times as many interleaved. Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023, section 2.3: ZB-H1 keeps as many as 1F1B.
    """
    if schedule == "gpipe":
        return float(micro_batches)
    most = float(pipeline - device)
    if stages_per_device > 1:
        most = (pipeline * (stages_per_device - 1) + 1 + 2 * (pipeline - device - 1)) / stages_per_device
    return min(most, float(micro_batches))


def _even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Deals blocks as `Plan.stage_ranges` does, to the middle first; some stages get none if there are too few."""
    counts = [num_blocks // num_stages] * num_stages
    for stage in [*range(1, num_stages - 1), 0][: num_blocks % num_stages]:
        counts[stage] += 1
    return tuple(counts)


def _balanced_by_parameters(num_blocks: int, pipeline: int, head_in_blocks: float, past: bool) -> tuple[list[int], int]:
    """Distributes blocks so that the parameters of blocks and head are shared; returns counts and the head's position.

    A position takes blocks until it has its share, and the last one takes the head. With `past` a position takes blocks
    until it has more than its share, and the head goes where the last block is. Source: nanotron, `build_model` in
    src/nanotron/models/base.py; where the head goes after its repair is what the sweep's speeds say.
    """
    total = num_blocks + head_in_blocks
    counts, position = [0] * pipeline, 0
    for block in range(1, num_blocks + 1):
        counts[position] += 1
        share = total * (position + 1) / pipeline
        if (block > share or (block == share and not past)) and position < pipeline - 1:
            position += 1
    return counts, position if past else pipeline - 1
