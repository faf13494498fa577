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
    """

    parameter_bytes: float
    trainable_parameters: float
    largest_block_parameters: float = 0.0
    optimizer_bytes_per_parameter: float = ADAM_BYTES_PER_PARAMETER
    activation_bytes_per_row: float = 0.0


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

    Parameters, gradients and optimizer state are split over the shard group. A sharded model gathers two blocks at a
    time, the one that computes and the one after it, in the precision of the computation, and holds one block's
    gradient in that precision before it is reduced. bfloat16 without sharding needs the same copies, as weights stay
    in float32.

    Source: Zhao et al., "PyTorch FSDP", 2023, section 3.3 (one unit ahead is gathered).
    """
    compute_bytes = 2.0 if plan.precision == "bf16" else 4.0
    makes_copies = plan.shard > 1 or plan.precision == "bf16"
    return MemoryEstimate(
        parameter_bytes=profile.parameter_bytes / plan.shard,
        gradient_bytes=GRADIENT_BYTES_PER_PARAMETER * profile.trainable_parameters / plan.shard,
        optimizer_bytes=profile.optimizer_bytes_per_parameter * profile.trainable_parameters / plan.shard,
        gathered_bytes=3 * compute_bytes * profile.largest_block_parameters if makes_copies else 0.0,
        activation_bytes=profile.activation_bytes_per_row * plan.rows_per_micro_batch(global_batch),
    )


def estimate_decoder_activation_bytes(
    *, sequence: int, hidden: int, layers: int, heads: int, vocabulary: int, mixed_precision: bool, stores_scores: bool
) -> float:
    """Returns the bytes that one row of `sequence` tokens keeps from forward to backward in a decoder.

    Per layer `sequence * hidden * 34` bytes in 16 bits, twice that in 32, plus `5 * heads * sequence ** 2` where
    attention stores its scores; at the end the logits and their gradient in float32.

    Args:
        sequence: Tokens in a row.
        hidden: Width of the model.
        layers: Number of decoder layers.
        heads: Attention heads.
        vocabulary: Number of token ids.
        mixed_precision: Whether activations are in bfloat16.
        stores_scores: Whether attention keeps its score matrix; fused attention does not.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equation 1.
    """
    per_layer = 34.0 * sequence * hidden + (5.0 * heads * sequence**2 if stores_scores else 0.0)
    logits = 2 * 4.0 * sequence * vocabulary
    return layers * per_layer * (1.0 if mixed_precision else 2.0) + logits
