"""Configurations of model families: where their numbers are, and those that lack one."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.planner.profiles.transformer_shape import from_config
from unit.planner.profiles.samples import EXPERTS, HYBRID, LLAMA_3_8B, SMALL


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
