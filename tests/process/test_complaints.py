"""Complaints of `tests/complaints.md` that no other test shows."""

from __future__ import annotations

import copy

import pytest
import torch
from one_line_models import tiny_gpt2, tiny_llama
from test_one_line_training import assert_same, batches, on_both


@pytest.fixture(params=["replicate=2", "shard=2"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


def train(model, device, steps=3):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for ids, labels in batches(device)[:steps]:
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def test_c21_adapters_train_are_saved_and_merged(tmp_path):
    peft = pytest.importorskip("peft")

    def script(device):
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        base = tiny_llama()
        model = peft.get_peft_model(copy.deepcopy(base), config).to(device)
        losses = train(model, device)
        model.save_pretrained(tmp_path / device)
        ids = batches(device)[0][0]
        again = peft.PeftModel.from_pretrained(base, tmp_path / device)
        return (
            losses,
            model(input_ids=ids).logits,
            again(input_ids=ids.cpu()).logits,
            model.merge_and_unload()(ids).logits,
        )

    torch.manual_seed(0)
    expected, got = on_both(script)
    assert_same(expected, got, rtol=1e-4, atol=1e-5)
    assert_same(got[1], got[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_c22_checkpointing_works_either_way(use_reentrant):
    def script(device):
        model = tiny_gpt2().to(device).train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return train(model, device), [parameter.detach() for parameter in model.parameters()]

    assert_same(*on_both(script), rtol=1e-4)
