"""The shape of a transformer, and the profile that follows from it.

Decides how a decoder's numbers (layers, widths, heads, vocabulary) become what each part of it costs, and how
configurations of known families spell those numbers. The profile that it makes is all that the rest of the planner
sees. Must not know plans, devices or weights.

[Note: bytes kept by a block]
Every operation of an unfused block keeps what its backward needs. With `h` the hidden width, `q` and `v` the widths of
queries and of keys or values, `f` that of the feed-forward and 2 bytes a value, a token keeps: two norms 2h + 2h (their
inputs; a norm's output is the input of the next product) + 2h + 2h; queries, keys, values before and after rotation
2(q + 2v) + 2(q + v); attention's result 2q; feed-forward 2f for what goes into the activation function, 2f for what
comes out, and where it is gated 2f for the gate's factor and 2f for their product. Source: counted as in Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.1, without dropout and with fused
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moreh_ap.errors import OptionError
from moreh_ap.planner.profile import ModelProfile, PartProfile, Product

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

    def __post_init__(self) -> None:
        for field in ("num_layers", "hidden", "ffn_hidden", "num_heads", "num_kv_heads", "head_dim", "vocabulary"):
            if getattr(self, field) < 1:
                raise OptionError(f"{self.name}: {field}={getattr(self, field)}", "at least 1")

    @property
    def parameters(self) -> float:
        """Parameter elements, tied ones once."""
        return profile_of(self, 1).parameters


def profile_of(shape: TransformerShape, sequence_length: int, context_length: int | None = None) -> ModelProfile:
    """Returns what a model of this shape costs with rows of `sequence_length` positions.

    Args:
        shape: The model.
        sequence_length: Positions of a row that one device computes.
        context_length: Positions that attention sees; more than `sequence_length` where devices share a row.
    """
    vocabulary = float(shape.vocabulary * shape.hidden)
    positions = float(shape.learned_positions * shape.hidden)
    return ModelProfile(
        name=shape.name,
        sequence_length=sequence_length,
        hidden=shape.hidden,
        num_blocks=shape.num_layers,
        first=PartProfile(
            parameters_split=vocabulary,
            parameters_whole=positions,
            moved_whole_bytes_per_token=4.0 * shape.hidden,
            num_kernels=4,
            num_tensor_sums=1,
        ),
        block=_block(shape, sequence_length, context_length or sequence_length),
        last=PartProfile(
            parameters_split=0.0 if shape.tied else vocabulary,
            parameters_whole=float(shape.hidden * (2 if shape.biases else 1)),
            products=(Product(shape.hidden, shape.vocabulary, "outer"),),
            kept_whole_bytes_per_token=4.0 * shape.hidden,
            selective_whole_bytes_per_token=4.0 * shape.hidden,
            moved_whole_bytes_per_token=4.0 * shape.hidden,
            num_kernels=16,
        ),
        logits_per_token=shape.vocabulary,
        tied=shape.tied,
        tied_parameters=vocabulary if shape.tied else 0.0,
    )


def _block(shape: TransformerShape, sequence_length: int, context_length: int) -> PartProfile:
    """See [Note: bytes kept by a block]."""
    hidden, ffn = shape.hidden, shape.ffn_hidden
    queries, values = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    widenings = 2 if shape.gated else 1
    experts, taken = shape.num_experts, float(shape.experts_per_token)
    attention_parameters = hidden * (queries + 2 * values) + queries * hidden
    ffn_parameters = experts * (widenings + 1) * hidden * ffn
    router = hidden * experts if experts > 1 else 0
    bias = (queries + 2 * values + hidden + experts * (widenings * ffn + hidden)) if shape.biases else 0
    norms = 2 * hidden * (2 if shape.biases else 1)
    products = [
        Product(hidden, queries + 2 * values, "outer"),
        Product(queries, hidden, "inner"),
        Product(hidden, widenings * ffn, "outer", taken, experts),
        Product(ffn, hidden, "inner", taken, experts),
    ]
    if router:
        products.append(Product(hidden, experts))
    rotated = 0.0 if shape.learned_positions else 2.0 * (queries + values)
    activations = 2.0 * ffn * taken * (2 * widenings)
    attention_kept = 2.0 * (queries + 2 * values) + rotated + 2.0 * queries
    return PartProfile(
        parameters_split=float(attention_parameters + ffn_parameters),
        parameters_whole=float(router + bias + norms),
        products=tuple(products),
        # scores and weighted sum, of which a causal mask leaves half
        attention_flops_per_row=2.0 * sequence_length * context_length * queries,
        attention_width=shape.head_dim,
        # softmax's result and a copy of it in the precision of the product
        score_bytes_per_row=5.0 * shape.num_heads * sequence_length * context_length,
        kept_split_bytes_per_token=attention_kept + activations,
        kept_whole_bytes_per_token=8.0 * hidden,
        # results of products and of attention; norms, rotation and activation functions are computed again
        selective_split_bytes_per_token=2.0 * (2 * queries + 2 * values) + 2.0 * widenings * ffn * taken,
        selective_whole_bytes_per_token=4.0 * hidden,
        # norms read and write, residuals read two and write one; rotation and activation functions read and write
        moved_split_bytes_per_token=2.0 * rotated + 4.0 * ffn * taken * (2 * widenings - 0.5),
        moved_whole_bytes_per_token=2.0 * hidden * (2 * 4 + 2 * 3),
        num_kernels=24 + (10 if rotated else 2) + (8 * min(experts, 8) if experts > 1 else 0),
        num_tensor_sums=2,
    )


# -- configurations ----------------------------------------------------------------------------------------------------

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_UNGATED = frozenset(
    {"gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2"}
    | {"codegen"}
)
_WITH_BIASES = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2", "gptj", "codegen"}
)
_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "mpt"})
_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text"}
)


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
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and _first(config, _LAYERS) is None:
        config = {**config, **inner}
    family = str(config.get("model_type", ""))
    name = name or family or "this configuration"
    layers, hidden = _number(config, _LAYERS, name), _number(config, _HIDDEN, name)
    heads, vocabulary = _number(config, _HEADS, name), _number(config, ("vocab_size",), name)
    experts = int(_first(config, ("num_local_experts", "num_experts", "n_routed_experts")) or 1)
    ffn = _first(config, (("moe_intermediate_size",) if experts > 1 else ()) + _FFN)
    if ffn is None:
        ffn = int(hidden * config.get("expansion_ratio", 4))
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query") else heads
    return TransformerShape(
        num_layers=layers,
        hidden=hidden,
        ffn_hidden=int(ffn),
        num_heads=heads,
        num_kv_heads=int(kv_heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
        tied=bool(config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)),
        gated=family not in _UNGATED,
        biases=family in _WITH_BIASES,
        num_experts=experts,
        experts_per_token=int(_first(config, ("num_experts_per_tok", "moe_topk")) or 1),
        learned_positions=int(_first(config, _POSITIONS) or 0) if family in _LEARNED_POSITIONS else 0,
        name=name,
    )


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _number(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    value = _first(config, keys)
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(
            f"{name}: no {' or '.join(keys)}", "a transformers configuration of a decoder", "--config config.json"
        )
    return value
