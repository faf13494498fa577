"""A model that stands beside a script, and that other hosts therefore may not have."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


class SmallLlama(LlamaForCausalLM):
    """A Llama with a forward of its own, so that workers have to find this module."""

    def forward(self, ids):
        logits_BTV = super().forward(input_ids=ids).logits
        return self.loss_function(logits_BTV, ids, vocab_size=self.config.vocab_size)


def small_llama() -> SmallLlama:
    return SmallLlama(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
