"""Which plans are worth looking at: the space of the search.

Decides how devices are assigned to axes, which orders, stages and micro-batches go with them, and which plans are left
out because another one is never worse. Must not know bytes, seconds or devices' names.

[Note: left out]
A plan is not looked at where a cheaper comparison settles it:

- `gpipe` where 1F1B can run: the same waiting, and more activations kept.
- a tensor axis without `sequence_parallel` where both are allowed and there are many devices: the same bytes travel,
  and every device keeps the replicated activations.
- more micro-batches than rows: the rest would be empty.
- uneven stages, unless head or embedding weigh at least half a block.
- a tensor axis over several nodes, state in host memory, and then parameters there, unless nothing fits without.
- of a number with many divisors, those that are near another one.

Plans left out by comparing memory are decided in `plan_search.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moreh_ap.plan import Plan
from moreh_ap.planner.profiles.model_profile import ModelProfile
from moreh_ap.planner.profiles.transformer_shape import TransformerShape
from moreh_ap.planner.search.constraints import Constraints

__all__ = ["Axes", "PipelineOrder", "enumerate_axes", "micro_batch_counts", "pipeline_orders", "recompute_kinds",
           "tensor_degrees_of"]  # fmt: skip

MOST_STAGES_PER_DEVICE = 4
"""Stages of a device at most: v stages wait 1/v as long and send v times the bytes, so more gain little. Source:
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2.2."""

_FEW_DEVICES = 8
"""Up to so many devices even what should never be better is looked at: it costs nothing."""

_MOST_DIVISORS = 11
"""Divisors of 1,024. Numbers with more are thinned, so that no number of devices takes much longer than others."""

_MOST_COUNTS = 12
"""Numbers of micro-batches that are looked at where rows have many divisors. Source: with 10, of 96 rows 16 was
left out between 12 and 24, and with it a plan that was 1 % faster."""

_WEIGHING_BLOCKS = 0.5
"""Cost of head or embedding, in blocks, from which on stages with fewer blocks are looked at."""


@dataclass(frozen=True)
class Axes:
    """How many devices each axis of a plan has; names as in `Plan`."""

    replicate: int
    shard: int
    tensor: int
    sequence_parallel: bool
    pipeline: int


@dataclass(frozen=True)
class PipelineOrder:
    """A pipeline's schedule and stages; names as in `Plan`. Without a pipeline there is the first one only."""

    schedule: str = "1f1b"
    stages_per_device: int = 1
    layers: tuple[int, ...] = ()


def tensor_degrees_of(shape: TransformerShape, most: int) -> tuple[int, ...]:
    """Returns the tensor degrees up to `most` that a model of this shape admits.

    Every device has complete heads; several devices may hold one head of keys and values, if the numbers divide.

    Example:
        >>> llama = TransformerShape(32, 4096, 14336, 32, 8, 128, 128256)
        >>> tensor_degrees_of(llama, 16)
        (1, 2, 4, 8, 16)
    """
    heads, shared = shape.num_heads, shape.num_kv_heads
    return tuple(
        degree
        for degree in range(1, min(most, heads) + 1)
        if heads % degree == 0 and (shared % degree == 0 or degree % shared == 0) and shape.ffn_hidden % degree == 0
    )


def enumerate_axes(
    profile: ModelProfile, num_devices: int, devices_per_node: int, constraints: Constraints, *, across_nodes: bool
) -> Iterator[Axes]:
    """Yields the ways to assign `num_devices` devices to axes. See [Note: left out].

    Args:
        profile: The model.
        num_devices: Devices; every plan uses all of them.
        devices_per_node: The tensor axis stays inside a node of so many.
        constraints: What the options leave.
        across_nodes: Whether only tensor axes are wanted that do not stay inside a node.
    """
    pipelines = [1]
    if constraints.pipeline_parallel and "pipeline" in constraints.kinds:
        most = num_devices if constraints.num_stages == "auto" else constraints.num_stages
        most = min(most, max(1, profile.num_blocks))
        pipelines = _thin(size for size in _divisors(num_devices) if size <= most)
    for tensor in _tensor_sizes(profile, num_devices, constraints):
        if (tensor > devices_per_node) != across_nodes:
            continue
        for split in _sequence_choices(profile, tensor, num_devices, constraints):
            for pipeline in pipelines:
                if num_devices % (tensor * pipeline) == 0:
                    sharing = num_devices // (tensor * pipeline)
                    for shard in _shards(sharing, constraints):
                        yield Axes(sharing // shard, shard, tensor, split, pipeline)


def pipeline_orders(profile: ModelProfile, pipeline: int, constraints: Constraints) -> tuple[PipelineOrder, ...]:
    """Returns the schedules and stages to look at for a pipeline of so many devices. See [Note: left out]."""
    if pipeline == 1:
        return (PipelineOrder(),)
    uneven = _lighter_ends(profile, pipeline)
    found = [PipelineOrder("1f1b"), PipelineOrder("zero_bubble")]
    if uneven:
        found += [PipelineOrder("1f1b", 1, uneven), PipelineOrder("zero_bubble", 1, uneven)]
    found.append(PipelineOrder("gpipe"))
    most = profile.num_blocks if constraints.num_stages == "auto" else constraints.num_stages
    stages = 2
    while stages <= MOST_STAGES_PER_DEVICE and pipeline * stages <= min(most, profile.num_blocks):
        found.append(PipelineOrder("interleaved", stages))
        stages *= 2
    return tuple(found)


def micro_batch_counts(rows: int, pipeline: int, order: PipelineOrder, constraints: Constraints) -> list[int]:
    """Returns the numbers of micro-batches to look at, rising.

    Args:
        rows: Rows of the batch that one group of the pipeline has.
        pipeline: Devices of the pipeline.
        order: The pipeline's order. GPipe is there for numbers that are too small for 1F1B.
        constraints: What the options leave.
    """
    counts = [constraints.num_micro_batches] if constraints.num_micro_batches != "auto" else _micro_batch_divisors(rows)
    if pipeline == 1:
        return counts
    if order.schedule == "gpipe":
        return [count for count in counts if count < pipeline]
    if order.schedule == "1f1b":
        return [count for count in counts if count >= pipeline]
    return [count for count in counts if count >= pipeline and count % max(1, count // pipeline) == 0]


def recompute_kinds(num_blocks: int, constraints: Constraints) -> tuple[str, ...]:
    """Returns what may be computed again, what costs least first; without blocks nothing can be.

    Example:
        >>> recompute_kinds(8, Constraints())
        ('none', 'selective', 'full')
    """
    if constraints.activation_recomputation is True:
        return ("selective", "full")
    if constraints.activation_recomputation is False or num_blocks == 0:
        return ("none",)
    return ("none", "selective", "full")


def _tensor_sizes(profile: ModelProfile, num_devices: int, constraints: Constraints) -> list[int]:
    if "tensor" not in constraints.kinds:
        return [1]
    if constraints.tensor_degrees is not None:
        return [size for size in _divisors(num_devices) if size == 1 or size in constraints.tensor_degrees]
    sides = [one.inner if one.split == "inner" else one.outer for one in profile.block.products if one.split]
    if not sides:
        return [1]
    return [size for size in _divisors(num_devices) if all(side % size == 0 for side in sides)]


def _sequence_choices(
    profile: ModelProfile, tensor: int, num_devices: int, constraints: Constraints
) -> tuple[bool, ...]:
    if tensor == 1 or "sequence_parallel" not in constraints.kinds or profile.sequence_length < tensor:
        return (False,)
    return (False, True) if num_devices <= _FEW_DEVICES else (True,)


def _shards(sharing: int, constraints: Constraints) -> list[int]:
    if sharing == 1 or constraints.distribute_parameter is False:
        return [1]
    sizes = _thin(_divisors(sharing))
    return [size for size in sizes if size > 1] if constraints.distribute_parameter is True else sizes


def _lighter_ends(profile: ModelProfile, pipeline: int) -> tuple[int, ...]:
    """Returns blocks for every stage such that first and last do as much as the others, or () if that is even."""
    block = profile.block.product_flops_per_token + profile.block.attention_flops_per_row / profile.sequence_length
    if block <= 0 or pipeline < 2:
        return ()
    first, last = (layer.product_flops_per_token / block for layer in (profile.first, profile.last))
    if max(first, last) < _WEIGHING_BLOCKS:
        return ()
    share = (profile.num_blocks + first + last) / pipeline
    ends = [max(1, round(share - first)), max(1, round(share - last))]
    middle, stages = profile.num_blocks - sum(ends), pipeline - 2
    if middle < stages or (stages == 0 and middle):
        return ()
    inner = [middle // stages + (1 if index < middle % stages else 0) for index in range(stages)] if stages else []
    counts = (ends[0], *inner, ends[1])
    even = tuple(len(one) for one in Plan(pipeline=pipeline).stage_ranges(profile.num_blocks))
    return () if counts == even else counts


def _micro_batch_divisors(rows: int) -> list[int]:
    """Returns 1, the divisors of `rows`, and where these leave large gaps the powers of two between them."""
    counts = set(_divisors(rows))
    power = 1
    while power <= rows:
        if not any(power / 1.5 <= count <= power * 1.5 for count in counts):
            counts.add(power)
        power *= 2
    return _thin(sorted(counts), _MOST_COUNTS)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def _thin(sizes: Iterable[int], most: int = _MOST_DIVISORS) -> list[int]:
    """Returns the sizes, without those that are less than 1.5 times another if there are more than `most`."""
    found = list(sizes)
    if len(found) <= most:
        return found
    kept = [found[0]]
    for size in found[1:]:
        if size >= 1.5 * kept[-1]:
            kept.append(size)
    if kept[-1] != found[-1]:
        kept[-1:] = [found[-1]] if len(kept) > 1 and found[-1] < 1.5 * kept[-1] else [kept[-1], found[-1]]
    return kept
