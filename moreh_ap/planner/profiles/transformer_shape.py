"""The shape of a decoder, and the profile that follows from it.

Decides how a decoder's numbers (layers, widths, heads, experts, vocabulary) become what each part of it costs. The
profile that it makes is all that the rest of the planner sees. Must not know plans, devices or weights.

[Note: blocks that differ]
A profile has one kind of block. Where blocks differ, as where the first ones have no experts, or where layers of
several kinds alternate, it is the mean of all blocks: sums over the model are exact, and a stage is taken to be as
mixed as the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.configurations import numbers_of
from moreh_ap.planner.profiles.layers import AttentionCost, FeedForwardCost, StateSpaceCost, mean_of
from moreh_ap.planner.profiles.model_profile import LayerProfile, ModelProfile, Product

__all__ = ["TransformerShape", "from_config", "profile_of"]


@dataclass(frozen=True)
class TransformerShape:
    """The numbers that a decoder is built from.

    Attributes:
        num_layers: Blocks.
        hidden: Width of the state between blocks.
        ffn_hidden: Width of the feed-forward; of one expert where there are several.
        num_heads: Heads of queries.
        num_kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        vocabulary: Tokens.
        tied: Whether embedding and head share their weights.
        gated: Whether the feed-forward has a gate, three matrices instead of two.
        biases: Whether products add a bias.
        num_experts: Feed-forwards of a block, 1 for a dense model.
        experts_per_token: How many of them a token goes through.
        learned_positions: Rows of a table of position embeddings; 0 without one.
        name: How messages call the model.
        rotated: Whether queries and keys are rotated by their positions where there is no such table.
        shared_hidden: Width of what every token goes through beside its experts.
        latent_hidden: Width in which experts work where it is not the hidden one, else 0.
        dense_layers: Layers that have a feed-forward in place of experts.
        dense_hidden: Width of that.
        value_dim: Width of a head's values where it is not `head_dim`, else 0.
        shared_dim: See `AttentionCost`, as for the two ranks.
        query_rank: Likewise.
        kv_rank: Likewise.
        kinds: A letter for each layer of a hybrid: "*" attention, "M" state space, "E" experts, "-" feed-forward; ""
            where each has attention and a feed-forward or experts.
        state_space: Numbers of a `StateSpaceCost` layer, () without.
        max_positions: Positions that a row may have; 0 where the configuration does not say.
    """

    num_layers: int
    hidden: int
    ffn_hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    biases: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    learned_positions: int = 0
    name: str = "transformer"
    rotated: bool = True
    shared_hidden: int = 0
    latent_hidden: int = 0
    dense_layers: int = 0
    dense_hidden: int = 0
    value_dim: int = 0
    shared_dim: int = 0
    query_rank: int = 0
    kv_rank: int = 0
    kinds: str = ""
    state_space: tuple[int, ...] = ()
    max_positions: int = 0

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "ffn_hidden", "num_heads", "num_kv_heads", "head_dim", "vocabulary"):
            if getattr(self, field) < 1:
                raise OptionError(f"{self.name}: {field}={getattr(self, field)}", "at least 1")
        if not 1 <= self.experts_per_token <= self.num_experts:
            fact = f"{self.name}: experts_per_token={self.experts_per_token} of num_experts={self.num_experts}"
            raise OptionError(fact, "1 up to the number of experts")

    @property
    def parameters(self) -> float:
        """Parameter elements, tied ones once."""
        return profile_of(self, 1).parameters


def from_config(config: Mapping[str, Any], name: str = "") -> TransformerShape:
    """Returns the shape that a transformers configuration describes.

    Args:
        config: The content of a `config.json`.
        name: How messages call the model; by default its family.

    Raises:
        OptionError: The configuration lacks a number without which a decoder has no shape.

    Example:
        >>> from_config({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
        ...              "n_positions": 1024}).parameters
        124439808.0
    """
    return TransformerShape(**numbers_of(config, name))


def profile_of(
    shape: TransformerShape, sequence_length: int, context_length: int | None = None, expert_spread: int = 1
) -> ModelProfile:
    """Returns what a model of this shape costs with rows of `sequence_length` positions.

    Args:
        shape: The model.
        sequence_length: Positions of a row that one device computes.
        context_length: Positions that attention sees; more than `sequence_length` where devices share a row.
        expert_spread: Devices over which each block's experts are distributed; the profile is that of one of them, with
            its part of the experts and the tokens of all devices that go there.
    """
    vocabulary = float(shape.vocabulary * shape.hidden)
    positions = float(shape.learned_positions * shape.hidden)
    return ModelProfile(
        name=shape.name,
        sequence_length=sequence_length,
        hidden=shape.hidden,
        num_blocks=shape.num_layers,
        first=LayerProfile(
            parameters_split=vocabulary,
            parameters_replicated=positions,
            moved_replicated_bytes_per_token=4.0 * shape.hidden,
            num_kernels=4,
            num_tensor_sums=1,
        ),
        block=_block(shape, sequence_length, context_length or sequence_length, expert_spread),
        last=LayerProfile(
            parameters_split=0.0 if shape.tied else vocabulary,
            parameters_replicated=float(shape.hidden * (2 if shape.biases else 1)),
            products=(Product(shape.hidden, shape.vocabulary, "outer"),),
            kept_replicated_bytes_per_token=4.0 * shape.hidden,
            selective_replicated_bytes_per_token=4.0 * shape.hidden,
            moved_replicated_bytes_per_token=4.0 * shape.hidden,
            num_kernels=16,
        ),
        logits_per_token=shape.vocabulary,
        tied=shape.tied,
        tied_parameters=vocabulary if shape.tied else 0.0,
    )


def _block(shape: TransformerShape, sequence_length: int, context_length: int, expert_spread: int) -> LayerProfile:
    """Returns what a block costs. See [Note: blocks that differ]."""
    hidden, biases, layers = shape.hidden, shape.biases, shape.num_layers
    attention = AttentionCost(
        shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim or shape.head_dim,
        shape.rotated and not shape.learned_positions, shape.query_rank, shape.kv_rank, shape.shared_dim,
    )  # fmt: skip
    experts = FeedForwardCost(
        shape.ffn_hidden, shape.gated, shape.num_experts, shape.experts_per_token, shape.shared_hidden,
        shape.latent_hidden, expert_spread,
    )  # fmt: skip
    attends, mixes = 1.0, 1.0 - shape.dense_layers / layers
    dense = shape.dense_layers / layers
    if shape.kinds:
        attends, mixes, dense = (shape.kinds.count(kind) / layers for kind in "*E-")
    parts = [
        (attention.profile(hidden, biases, sequence_length, context_length), attends),
        (experts.profile(hidden, biases), mixes),
    ]
    if dense:
        parts.append((FeedForwardCost(shape.dense_hidden, shape.gated).profile(hidden, biases), dense))
    if shape.state_space:
        state_space = StateSpaceCost(*shape.state_space)
        parts.append((state_space.profile(hidden, biases, sequence_length), shape.kinds.count("M") / layers))
    return mean_of(parts)
