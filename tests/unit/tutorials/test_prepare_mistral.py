"""The Mistral of the tutorial: the logits of the Llama it is made of, and a refusal where that cannot be."""

from __future__ import annotations

import pytest
import torch
from prepare_mistral import as_mistral
from transformers import LlamaConfig, LlamaForCausalLM, MistralForCausalLM

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3}  # fmt: skip


@pytest.mark.parametrize("rope_theta", [10000.0, 77.0])
@pytest.mark.parametrize("tied", [True, False])
def test_it_has_the_logits_of_the_llama(rope_theta: float, tied: bool, tmp_path) -> None:
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope, tie_word_embeddings=tied)).eval()
    as_mistral(llama).save_pretrained(tmp_path)
    mistral = MistralForCausalLM.from_pretrained(tmp_path)
    assert mistral.config.model_type == "mistral" and mistral.config.sliding_window is None
    tokens = torch.arange(64)[None]
    torch.testing.assert_close(mistral(tokens).logits, llama(tokens).logits, rtol=0, atol=0)
    assert mistral.num_parameters() == llama.num_parameters()


def test_a_llama_that_no_mistral_is_equal_to_is_refused() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True))
    with pytest.raises(SystemExit, match=r"not the same model: .*unexpected=\['model.layers.0.self_attn.q_proj.bias'"):
        as_mistral(llama)
