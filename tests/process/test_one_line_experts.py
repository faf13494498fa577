"""Mixtures of experts of transformers, as trained from their default settings: dropout, jitter, losses of routers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = pytest.mark.rotating  # one more model or plan each

VOCABULARY = 60
_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": True,
}
_SWITCH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_heads": 4,
    "num_experts": 8,
    "expert_capacity": 4,
    "decoder_start_token_id": 0,
}
_NLLB: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "num_experts": 4,
    "expert_capacity": 6,
}


def _decoder(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**{**_DECODER, **settings})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _translator(name: str, settings: dict[str, Any], **others: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**settings, **others)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config)

    return make


DECODERS = {
    "mixtral": _decoder("Mixtral", num_local_experts=4),
    "qwen2": _decoder("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=24),
    "qwen3": _decoder("Qwen3Moe", num_experts=4),
    "olmoe": _decoder("Olmoe", num_experts=4),
    "gpt_oss": _decoder("GptOss", num_local_experts=4),
    "deepseek": _decoder(
        "DeepseekV3",
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=16,
        head_dim=4,
        num_key_value_heads=4,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
}
TRANSLATORS = {
    "switch": _translator("SwitchTransformers", _SWITCH),
    "switch_losses": _translator("SwitchTransformers", _SWITCH),
    "nllb": _translator("NllbMoe", _NLLB),
}


def _batch(rows: int, device: str) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (rows, 9))
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}


def _trained(make: Callable[[], nn.Module], device: str, is_translator: bool, **arguments: Any) -> list[Tensor]:
    """Returns losses, and the weights after some steps with batches of several sizes."""
    torch.manual_seed(0)
    model = make().to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    trace = []
    for rows in (6, 6, 5, 8):
        batch = _batch(rows, device)
        labels = torch.randint(3, VOCABULARY, (rows, 7)).to(device) if is_translator else batch["input_ids"]
        loss = model(**batch, labels=labels, **arguments).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.append(loss.detach())
    return [*trace, *(value.float() for value in model.state_dict().values()), torch.rand(2)]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_losses_that_balance_experts(accelerator, plan, name):
    accelerator(plan, strict=True)
    assert_same(*on_both(lambda device: _trained(DECODERS[name], device, False)), rtol=1e-4, atol=1e-6)


_WHOLE = [("nllb", "replicate=2")]  # the forward calls other functions than the trial's


@pytest.mark.parametrize(
    ("name", "plan"),
    [one for one in itertools.product(TRANSLATORS, ["replicate=2", "shard=2"]) if one not in _WHOLE],
)
def test_translators_that_drop_words_and_draw_in_their_experts(accelerator, name, plan):
    accelerator(plan, strict=True)
    arguments = {"output_router_logits": True} if name == "switch_losses" else {}
    assert_same(*on_both(lambda device: _trained(TRANSLATORS[name], device, True, **arguments)), rtol=1e-4, atol=1e-6)
