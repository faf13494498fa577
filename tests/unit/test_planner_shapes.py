"""Shapes of decoders against parameter counts that their makers publish, and what follows from a shape."""

from __future__ import annotations

import doctest

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.planner import shapes
from moreh_ap.planner.shapes import TransformerShape, from_config, profile_of

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
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


def test_tied_weights_count_once():
    untied = from_config({**GPT2, "tie_word_embeddings": False})
    assert untied.parameters - from_config(GPT2).parameters == 768 * 50257


def test_a_configuration_of_several_parts_gives_its_text_part():
    assert from_config({"model_type": "gemma3", "text_config": LLAMA_3_8B}).num_layers == 32


def test_devices_that_share_a_row_see_all_of_it_in_attention():
    whole, half = profile_of(LLAMA, 8192), profile_of(LLAMA, 4096, 8192)
    assert half.block.attention_flops_per_row == whole.block.attention_flops_per_row / 2


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_configuration_without_a_number_says_which(missing):
    config = {key: value for key, value in LLAMA_3_8B.items() if key != missing}
    with pytest.raises(OptionError, match=missing):
        from_config(config)


def test_a_shape_without_layers_is_none():
    with pytest.raises(OptionError, match="num_layers=0"):
        TransformerShape(0, 64, 256, 4, 4, 16, 1000)


def test_examples_in_docstrings():
    outcome = doctest.testmod(shapes)
    assert outcome.attempted > 0
    assert outcome.failed == 0
