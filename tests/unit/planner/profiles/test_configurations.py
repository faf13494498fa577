"""Configurations of model families: where their numbers are, and those that lack one."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.transformer_shape import from_config

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
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1000,
}
EXPERTS = {"moe_intermediate_size": 96, "num_experts_per_tok": 4}
HYBRID = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*EM-E",
    "n_routed_experts": 16,
    "moe_shared_expert_intermediate_size": 192,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "chunk_size": 128,
}


@pytest.mark.parametrize("pattern", ["", "MEX"])
def test_a_hybrid_without_a_pattern_of_known_layers_is_refused(pattern):
    with pytest.raises(OptionError, match="layers"):
        from_config({**SMALL, **EXPERTS, **HYBRID, "hybrid_override_pattern": pattern})


def test_a_configuration_of_several_parts_gives_its_text_part():
    assert from_config({"model_type": "gemma3", "text_config": LLAMA_3_8B}).num_layers == 32


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_configuration_without_a_number_says_which(missing):
    config = {key: value for key, value in LLAMA_3_8B.items() if key != missing}
    with pytest.raises(OptionError, match=missing):
        from_config(config)
