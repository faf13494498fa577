"""How many bytes the fullest device needs under a plan, and what a model says about itself for that.

Decides the memory formula. Must not know devices, processes or torch: it takes numbers and returns numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from moreh_ap.plan import Plan

GRADIENT_BYTES_PER_PARAMETER = 4.0
"""Gradients are kept and summed in float32 under every plan of this version."""

ADAM_BYTES_PER_PARAMETER = 8.0
"""Two float32 averages for each parameter. Source: Rajbhandari et al., "ZeRO", 2020, section 3.1."""


@dataclass(frozen=True)
class ModelProfile:
    """What the planner knows of a model; all of it can be read off the model without its weights.

    Attributes:
        parameter_bytes: Bytes of all parameters and buffers, tied ones once, in the precision they are trained in.
        trainable_parameters: Number of parameter elements that get a gradient.
        largest_block_parameters: Elements of the largest unit that sharding gathers at a time; 0 means unknown.
        optimizer_bytes_per_parameter: Bytes of optimizer state for each trainable element.
        activation_bytes_per_row: Bytes that a row of the batch keeps from forward to backward; 0.0 means unknown.
        selective_bytes_per_row: The same under selective recomputation; 0.0 means unknown.
        recomputed_bytes_per_row: The same where every block is recomputed in full; 0.0 means unknown.
        num_blocks: Number of repeated blocks; 0 means unknown.
    """

    parameter_bytes: float
    trainable_parameters: float
    largest_block_parameters: float = 0.0
    optimizer_bytes_per_parameter: float = ADAM_BYTES_PER_PARAMETER
    activation_bytes_per_row: float = 0.0
    selective_bytes_per_row: float = 0.0
    recomputed_bytes_per_row: float = 0.0
    num_blocks: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the fullest device, by what they hold."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    gathered_bytes: float
    activation_bytes: float

    @property
    def total_bytes(self) -> float:
        """Bytes of everything together."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.gathered_bytes
            + self.activation_bytes
        )


def estimate_memory(profile: ModelProfile, plan: Plan, global_batch: int) -> MemoryEstimate:
    """Returns what the fullest device holds at the peak of a training step.

    Parameters, gradients and optimizer state are split over the shard group, the tensor axis and the stages. A sharded
    model gathers two blocks at a time, the one that computes and the one after it, in the precision of the
    computation, and holds one block's gradient in that precision before it is reduced. bfloat16 without sharding needs
    the same copies, as weights stay in float32. State that is offloaded is not on the device.

    The embedding and the head are counted as if every stage had its part of them, so that a pipeline's first and last
    stages are underestimated in a model with a large vocabulary.

    Source: Zhao et al., "PyTorch FSDP", 2023, section 3.3 (one unit ahead is gathered).
    """
    compute_bytes = 2.0 if plan.precision == "bf16" else 4.0
    makes_copies = plan.shard > 1 or plan.precision == "bf16"
    part = _fullest_part_of_blocks(plan) / (plan.shard * plan.tensor)
    on_device = 0.0 if plan.offload == "optimizer" else profile.optimizer_bytes_per_parameter
    return MemoryEstimate(
        parameter_bytes=profile.parameter_bytes * part,
        gradient_bytes=GRADIENT_BYTES_PER_PARAMETER * profile.trainable_parameters * part,
        optimizer_bytes=on_device * profile.trainable_parameters * part,
        gathered_bytes=3 * compute_bytes * profile.largest_block_parameters / plan.tensor if makes_copies else 0.0,
        activation_bytes=_activation_bytes_per_row(profile, plan)
        * plan.rows_per_micro_batch(global_batch)
        * _micro_batches_under_way(plan)
        * _fullest_part_of_blocks(plan)
        / plan.tensor,
    )


def _fullest_part_of_blocks(plan: Plan) -> float:
    """Returns which part of all blocks the fullest device has; stage `s` is on device `s % pipeline` of the pipeline.

    Source: torch/distributed/pipelining/stage.py, `stage_index_to_group_rank`.
    """
    if not plan.layers:
        return 1.0 / plan.pipeline
    return max(sum(plan.layers[device :: plan.pipeline]) for device in range(plan.pipeline)) / sum(plan.layers)


def _micro_batches_under_way(plan: Plan) -> float:
    """Returns of how many micro-batches the first device of the pipeline keeps the activations at a time.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2: all
    of them under GPipe, as many as there are devices under 1F1B, 1 + (p - 1) / (p v) times that interleaved. Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2023, section 2.3: ZB-H1 keeps as many as 1F1B.
    """
    if plan.pipeline == 1:
        return 1.0
    if plan.schedule == "gpipe":
        return float(plan.micro_batches)
    most = float(plan.pipeline)
    if plan.stages_per_device > 1:
        most *= 1.0 + (plan.pipeline - 1) / (plan.pipeline * plan.stages_per_device)
    return min(most, float(plan.micro_batches))


def _activation_bytes_per_row(profile: ModelProfile, plan: Plan) -> float:
    """Returns what a row keeps under the plan's recomputation; as much as without where that is unknown."""
    everything = profile.activation_bytes_per_row
    if plan.recompute == "selective":
        return profile.selective_bytes_per_row or everything
    recomputed = profile.recomputed_bytes_per_row or everything
    if plan.recompute == "full":
        return recomputed
    if isinstance(plan.recompute, int) and profile.num_blocks:
        part = min(1.0, plan.recompute * plan.num_stages / profile.num_blocks)
        return everything + part * (recomputed - everything)
    return everything


def estimate_decoder_activation_bytes(
    *,
    sequence: int,
    hidden: int,
    layers: int,
    heads: int,
    vocabulary: int,
    mixed_precision: bool,
    stores_scores: bool,
    recompute: str = "none",
) -> float:
    """Returns the bytes that one row of `sequence` tokens keeps from forward to backward in a decoder.

    Per layer `sequence * hidden * 34` bytes in 16 bits, twice that in 32, plus `5 * heads * sequence ** 2` where
    attention stores its scores; at the end the logits and their gradient in float32.

    Recomputed in full, a layer keeps its input (2 of the 34) and one layer at a time has everything. Recomputed
    selectively it keeps that input and the results of its products (q, k and v 6, attention 2, its projection 2, the
    first of the MLP 8, the second 2: 22 in all) and, of the scores, those two of five bytes that are a product's.

    Args:
        sequence: Tokens in a row.
        hidden: Width of the model.
        layers: Number of decoder layers.
        heads: Attention heads.
        vocabulary: Number of token ids.
        mixed_precision: Whether activations are in bfloat16.
        stores_scores: Whether attention keeps its score matrix; fused attention does not.
        recompute: "none", "selective" or "full".

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 1 and
    section 4.1, for the parts of a layer.
    """
    scores = heads * sequence**2 if stores_scores else 0.0
    width = sequence * hidden
    whole_layer = 34.0 * width + 5.0 * scores
    kept = {
        "none": layers * whole_layer,
        "selective": layers * (22.0 * width + 2.0 * scores) + 12.0 * width + 3.0 * scores,
        "full": layers * 2.0 * width + whole_layer,
    }[recompute]
    logits = 2 * 4.0 * sequence * vocabulary
    return kept * (1.0 if mixed_precision else 2.0) + logits
