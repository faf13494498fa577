"""Configurations of models."""

from __future__ import annotations

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
