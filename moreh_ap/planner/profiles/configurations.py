"""How configurations of known families spell the numbers of a decoder.

Decides under which keys a number is found, and what a family has that its configuration does not say. Must not know
what the numbers cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moreh_ap.errors import OptionError

__all__ = ["numbers_of"]

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_TAKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_UNGATED = frozenset(
    {"gpt2", "gptj", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2"}
    | {"codegen", "nemotron", "nemotron_h"}
)
_WITH_BIASES = frozenset(
    {"gpt2", "gpt_neo", "gpt_neox", "gpt_bigcode", "opt", "bloom", "phi", "starcoder2", "gptj", "codegen", "gpt_oss"}
)
_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_neo", "gpt_bigcode", "opt", "mpt"})
_UNROTATED = frozenset({"nemotron_h"})
_TIED_BY_DEFAULT = frozenset(
    {"gpt2", "gpt_neo", "gpt_bigcode", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text"}
)
_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "moe": "E", "mlp": "-"}
"""Layers of hybrids by one letter each, as `hybrid_override_pattern` spells them."""


def numbers_of(config: Mapping[str, Any], name: str = "") -> dict[str, Any]:
    """Returns the arguments of `TransformerShape` that a transformers configuration describes.

    Args:
        config: The content of a `config.json`.
        name: How messages call the model; by default its family.

    Raises:
        OptionError: The configuration lacks a number without which a decoder has no shape.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and _first(config, _LAYERS) is None:
        config = {**config, **inner}
    family = str(config.get("model_type", ""))
    name = name or family or "this configuration"
    kinds = _kinds(config, name)
    layers = len(kinds) or _number(config, _LAYERS, name)
    hidden, heads = _number(config, _HIDDEN, name), _number(config, _HEADS, name)
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is None:
        kv_heads = 1 if config.get("multi_query") else heads
    return {
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "num_kv_heads": int(kv_heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocabulary": _number(config, ("vocab_size",), name),
        "tied": bool(config.get("tie_word_embeddings", family in _TIED_BY_DEFAULT)),
        "gated": family not in _UNGATED,
        "biases": family in _WITH_BIASES,
        "rotated": family not in _UNROTATED,
        "learned_positions": int(_first(config, _POSITIONS) or 0) if family in _LEARNED_POSITIONS else 0,
        "name": name,
        "kinds": kinds,
        "max_positions": int(_first(config, _POSITIONS) or 0),
        **_feed_forward(config, hidden, layers),
        **_latent_attention(config),
        **_state_space(config, kinds),
    }


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> dict[str, Any]:
    """Returns widths of feed-forwards and experts, and how many layers have no experts."""
    experts = int(_first(config, _EXPERTS) or 1)
    dense = int(_first(config, _FFN) or hidden * config.get("expansion_ratio", 4))
    if experts == 1:
        return {"ffn_hidden": dense}
    width = int(config.get("moe_intermediate_size") or dense)
    shared = _first(config, ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"))
    count = config.get("n_shared_experts", 1 if shared else 0) or 0
    step, alone = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    first = int(config.get("first_k_dense_replace") or 0)
    return {
        "ffn_hidden": width,
        "num_experts": experts,
        "experts_per_token": int(_first(config, _TAKEN) or 1),
        "shared_hidden": int(count * (shared or width)),
        "latent_hidden": int(config.get("moe_latent_size") or 0),
        "dense_hidden": dense,
        "dense_layers": sum(layer < first or layer in alone or (layer + 1) % step != 0 for layer in range(layers)),
    }


def _latent_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the widths of multi-head latent attention, nothing for other kinds."""
    if not config.get("kv_lora_rank"):
        return {}
    shared = int(config.get("qk_rope_head_dim") or 0)
    return {
        "head_dim": int(config.get("qk_nope_head_dim") or 0) + shared,
        "value_dim": int(config.get("v_head_dim") or 0),
        "shared_dim": shared,
        "query_rank": int(config.get("q_lora_rank") or 0),
        "kv_rank": int(config["kv_lora_rank"]),
    }


def _state_space(config: Mapping[str, Any], kinds: str) -> dict[str, Any]:
    if "M" not in kinds:
        return {}
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "chunk_size")
    return {"state_space": tuple(_number(config, (name,), "a state-space layer") for name in names)}


def _kinds(config: Mapping[str, Any], name: str) -> str:
    """Returns the kind of every layer of a hybrid, "" where all layers have attention and a feed-forward."""
    if config.get("model_type") != "nemotron_h":
        return ""
    pattern = config.get("hybrid_override_pattern") or "".join(
        _KINDS.get(str(kind), "?") for kind in config.get("layers_block_type") or ()
    )
    if not pattern or set(pattern) - set(_KINDS.values()):
        allowed = f"a pattern of {', '.join(sorted(set(_KINDS.values())))}"
        raise OptionError(f"{name}: layers {pattern!r}", allowed, "--config config.json")
    return str(pattern)


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _number(config: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    value = _first(config, keys)
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(
            f"{name}: no {' or '.join(keys)}", "a transformers configuration of a decoder", "--config config.json"
        )
    return value
