"""A transformers configuration made small: the same structure with fewer blocks, narrow heads and few words.

Decides which settings are reduced and to what. What decides how a plan splits a model stays: the number of heads and of
key-value heads, tied weights, fused projections, windows, kinds of blocks. Must not import transformers: a
configuration is an object with attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

VOCABULARY = 101
"""A prime: no number of devices divides it."""
MANY_HEADS, WIDE_HEAD, NARROW_HEAD = 8, 16, 8
WINDOW = 4
NUM_EXPERTS, EXPERTS_PER_TOKEN = 4, 2
POSITIONS = 64

_COUNTS_OF_BLOCKS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "word_embed_proj_dim", "embedding_size")
_INTERMEDIATE = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_EXPERTS = {
    "num_local_experts": NUM_EXPERTS,
    "num_experts": NUM_EXPERTS,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": EXPERTS_PER_TOKEN,
}
_WORDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def reduce_config(config: Any, depth: int, positions: int = POSITIONS) -> Any:
    """Returns a copy of `config` for a small model without dropout, in float32.

    Args:
        config: A `PretrainedConfig`.
        depth: Number of blocks; more if the first ones do not have every kind of block that there is.
        positions: Positions that calls need.
    """
    small = copy.deepcopy(config)
    _narrow(small)
    cut_config(small, _num_blocks(config), depth_with_every_kind(config, depth))
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is not None and vocabulary > VOCABULARY:
        small.vocab_size = VOCABULARY
        for name, word in _WORDS.items():
            value = getattr(config, name, None)
            if value is not None and (not isinstance(value, int) or value >= VOCABULARY):
                setattr(small, name, word)
    limits = {**_EXPERTS, "sliding_window": WINDOW, "max_position_embeddings": max(POSITIONS, positions)}
    for name, most in limits.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > most:
            setattr(small, name, most)
    small.use_cache = False
    without_dropout(small)
    return small


def _narrow(config: Any) -> None:
    """Makes heads narrow; everything that is as wide as the hidden states follows."""
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    head_dim = WIDE_HEAD if heads <= MANY_HEADS else NARROW_HEAD
    for name in _HIDDEN:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, heads * head_dim)
    if isinstance(vars(config).get("head_dim"), int) or isinstance(vars(config).get("d_kv"), int):
        config.head_dim = head_dim
    for name in _INTERMEDIATE:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 2 * heads * head_dim)
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict):
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        for key, value in parameters.items():
            if isinstance(value, list):  # a factor for each rotated pair
                parameters[key] = value[:rotated]


def depth_with_every_kind(config: Any, depth: int) -> int:
    """Returns how many of the first blocks are needed so that no kind of block (window, linear, ...) is missing."""
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, (list, tuple)):
        depth = max([depth, *(list(kinds).index(kind) + 1 for kind in kinds)])
    return min(depth, _num_blocks(config) or depth)


def cut_config(config: Any, before: int, depth: int) -> None:
    """Makes a configuration of `before` blocks one of `depth`: counts, and lists with an entry for each block."""
    for name in _COUNTS_OF_BLOCKS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > depth:
            setattr(config, name, depth)
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == before > depth:
            setattr(config, name, value[:depth])


def without_dropout(holder: Any) -> None:
    """Sets every number with "drop" in its name to zero."""
    for name in _names_of_dropouts(vars(holder)):
        setattr(holder, name, 0.0)


def _names_of_dropouts(attributes: dict[str, Any]) -> Iterable[str]:
    return [name for name, value in attributes.items() if "drop" in name and isinstance(value, float)]


def _num_blocks(config: Any) -> int:
    value = getattr(config, "num_hidden_layers", 0)
    return value if isinstance(value, int) else 0
