"""Configurations of transformers, made small."""

from __future__ import annotations

from moreh_ap.integrations.transformers_reduced import VOCABULARY, reduce_config


def test_a_configuration_keeps_heads_and_every_kind_of_block():
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma2", num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=26)
    small = reduce_config(config, 1)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 4)
    assert small.num_hidden_layers == len(small.layer_types) == len(set(config.layer_types)) == 2
    assert small.hidden_size == 8 * small.head_dim
    assert small.vocab_size == VOCABULARY
    assert config.num_hidden_layers == 26, "the model's own is not touched"
