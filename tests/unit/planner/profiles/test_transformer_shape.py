"""Shapes of decoders against counts that their makers publish or transformers makes, and what follows from them."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles import transformer_shape
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, from_config, profile_of
from unit.planner.profiles.samples import EXPERTS, HYBRID, LLAMA_3_8B, SMALL

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
MIXTRAL_8X7B = {
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
OPT_125M = {
    "model_type": "opt",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2050,
}
GPT_NEOX_20B = {
    "model_type": "gpt_neox",
    "num_hidden_layers": 44,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "vocab_size": 50432,
    "tie_word_embeddings": False,
}
QWEN_2_5_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LLAMA = TransformerShape(32, 4096, 14336, 32, 8, 128, 128256, name="llama")


@pytest.mark.parametrize(
    ("config", "parameters", "tolerance"),
    [
        (GPT2, 124_439_808, 0.0),
        (LLAMA_3_8B, 8_030_261_248, 0.0),
        (MIXTRAL_8X7B, 46_702_792_704, 0.0),
        (OPT_125M, 125_239_296, 2e-5),
        (GPT_NEOX_20B, 20_554_567_680, 1e-4),
        (QWEN_2_5_7B, 7_615_616_512, 1e-4),  # biases of queries, keys and values are not counted
    ],
)
def test_parameters_are_those_that_the_makers_publish(config, parameters, tolerance):
    assert from_config(config).parameters == pytest.approx(parameters, rel=tolerance, abs=0.5)


def test_operations_follow_from_parameters():
    profile = profile_of(LLAMA, 4096)
    in_products = LLAMA.parameters - LLAMA.vocabulary * LLAMA.hidden - (2 * LLAMA.num_layers + 1) * LLAMA.hidden
    attention = 6.0 * LLAMA.num_layers * LLAMA.hidden * 4096  # a token: 12 L h s, of which the mask leaves half
    assert profile.flops_per_row == pytest.approx(4096 * (6.0 * in_products + attention))


def test_a_token_of_a_mixture_computes_with_its_experts_alone():
    mixtral = from_config(MIXTRAL_8X7B)
    assert profile_of(mixtral, 1).block.product_flops_per_token == pytest.approx(
        2 * (mixtral.hidden * (mixtral.hidden * 2 + 2 * 8 * 128) + 2 * 3 * mixtral.hidden * 14336 + mixtral.hidden * 8)
    )


LATENT_ATTENTION = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
MIXTURES = {
    "latent attention, first blocks dense": {
        **SMALL, **EXPERTS, **LATENT_ATTENTION, "model_type": "deepseek_v3", "num_hidden_layers": 6,
        "q_lora_rank": 64, "n_routed_experts": 16, "n_shared_experts": 1, "first_k_dense_replace": 2,
    },
    "queries at once, two shared experts": {
        **SMALL, **EXPERTS, **LATENT_ATTENTION, "model_type": "deepseek_v3", "num_hidden_layers": 3,
        "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1,
    },
    "every second block, some not": {
        **SMALL, **EXPERTS, "model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 16,
        "decoder_sparse_step": 2, "mlp_only_layers": [1],
    },
    "a shared expert of its own width": {
        **SMALL, **EXPERTS, "model_type": "qwen2_moe", "num_hidden_layers": 3, "num_experts": 8,
        "shared_expert_intermediate_size": 300,
    },
    "biases": {
        **SMALL, "model_type": "gpt_oss", "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "state spaces": {**SMALL, **EXPERTS, **HYBRID},
    "state spaces, experts in a latent width": {**SMALL, **EXPERTS, **HYBRID, "moe_latent_size": 64},
    "no gate": {**SMALL, "model_type": "nemotron", "num_hidden_layers": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_parameters_are_those_that_transformers_makes(name):
    """Small biases and the norms of single heads are not counted; nothing else may be missing."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**MIXTURES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    made = sum(parameter.numel() for parameter in model.parameters())
    assert from_config(MIXTURES[name]).parameters == pytest.approx(made, rel=1e-3)
    assert from_config(config.to_dict()).parameters == from_config(MIXTURES[name]).parameters


def test_a_token_is_multiplied_with_the_parameters_that_the_makers_call_active():
    stated = {"DeepSeek-V3": 37e9, "Kimi-K2": 32e9, "Qwen3-30B-A3B": 3.3e9, "Nemotron-3-Super-120B-A12B": 12.7e9}
    for name, parameters in stated.items():
        profile = profile_of(find_model(name).shape, 1)
        blocks = profile.num_blocks * profile.block.product_flops_per_token
        multiplied = (blocks + profile.last.product_flops_per_token) / 2.0  # a product and a sum for each parameter
        assert multiplied == pytest.approx(parameters, rel=0.1), name


def test_a_profile_is_the_mean_of_blocks_that_differ():
    mixed = from_config(MIXTURES["latent attention, first blocks dense"])
    dense = profile_of(replace(mixed, dense_layers=6), 64).block
    sparse = profile_of(replace(mixed, dense_layers=0), 64).block
    mean = profile_of(mixed, 64).block
    kept, moved = "kept_split_bytes_per_token", "moved_replicated_bytes_per_token"
    for field in ("parameters", "product_flops_per_token", kept, moved):
        assert getattr(mean, field) == pytest.approx((2 * getattr(dense, field) + 4 * getattr(sparse, field)) / 6)


def test_tokens_of_an_expert_do_not_depend_on_how_many_blocks_have_experts():
    """What decides a product's rate is how many tokens a matrix gets."""
    mixed = from_config(MIXTURES["latent attention, first blocks dense"])
    all_blocks, some = (
        next(one for one in profile_of(shape, 64).block.products if one.copies > 1.0)
        for shape in (replace(mixed, dense_layers=0), mixed)
    )
    assert some.share == pytest.approx(all_blocks.share * 4 / 6)
    assert some.share / some.copies == pytest.approx(all_blocks.share / all_blocks.copies)


def test_experts_that_are_dealt_leave_a_device_its_part_and_the_same_work():
    mixtral = from_config(MIXTRAL_8X7B)
    whole, part = profile_of(mixtral, 128), profile_of(mixtral, 128, expert_spread=4)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.parameters - part.parameters == pytest.approx(experts * 3 / 4)
    assert part.flops_per_row == whole.flops_per_row


def test_more_experts_for_a_token_than_there_are_is_refused():
    with pytest.raises(OptionError, match="experts_per_token=9"):
        from_config({**MIXTRAL_8X7B, "num_experts_per_tok": 9})


def test_tied_weights_count_once():
    untied = from_config({**GPT2, "tie_word_embeddings": False})
    assert untied.parameters - from_config(GPT2).parameters == 768 * 50257


def test_devices_that_share_a_row_see_all_of_it_in_attention():
    whole, half = profile_of(LLAMA, 8192), profile_of(LLAMA, 4096, 8192)
    assert half.block.attention_flops_per_row == whole.block.attention_flops_per_row / 2


def test_a_shape_without_layers_is_none():
    with pytest.raises(OptionError, match="num_layers=0"):
        TransformerShape(0, 64, 256, 4, 4, 16, 1000)


def test_examples_in_docstrings():
    outcome = doctest.testmod(transformer_shape)
    assert outcome.attempted > 0
    assert outcome.failed == 0
