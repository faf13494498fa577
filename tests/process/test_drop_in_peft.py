"""PEFT and TRL with the one line: whole scripts, adapters under every plan, and what is refused."""

from __future__ import annotations

import re
from functools import partial

import peft_models
import pytest
import torch
from drop_in_runs import assert_same, num_losses
from peft_models import batch, lora_gpt2, lora_llama
from torch import nn
from user_script import UserScript

from moreh_ap.errors import PlanError

pytestmark = pytest.mark.rotating  # one more script or kind of adapter each

pytest.importorskip("peft")
pytest.importorskip("trl")

ADAPTED = {
    "llama": partial(lora_llama, target_modules="all-linear"),
    "llama, DoRA": partial(lora_llama, use_dora=True),
    "llama, head trained": partial(lora_llama, modules_to_save=["lm_head"]),
    "llama, embedding": partial(lora_llama, target_modules=["embed_tokens", "v_proj"]),
    "gpt2": lora_gpt2,
}
PLANS = [
    "replicate=2",
    "replicate=2,micro_batches=2",
    "shard=2",
    "shard=2,recompute=full",
    "replicate=2,recompute=selective",
    "pipeline=2,micro_batches=2",
]
CASES = [
    *(("llama", plan) for plan in PLANS),
    *(("gpt2", plan) for plan in ("replicate=2", "shard=2", "pipeline=2,micro_batches=2")),
    *(("llama, DoRA", plan) for plan in ("replicate=2", "shard=2,recompute=full")),
    *(("llama, head trained", plan) for plan in ("shard=2", "pipeline=2,micro_batches=2")),
    *(("llama", plan) for plan in ("shard=2,micro_batches=2", "shard=2,offload=optimizer", "replicate=2,shard=2")),
    *(("llama, embedding", plan) for plan in ("replicate=2", "shard=2", "shard=2,recompute=full")),
    *(("llama", plan) for plan in ("offload=all", "shard=2,micro_batches=2,recompute=full,offload=all")),
    *((name, "shard=2,offload=all") for name in ("gpt2", "llama, DoRA", "llama, embedding")),
]


def test_adapters_of_five_families_are_trained_saved_and_loaded_as_on_one_device(both_in_turn, tmp_path):
    ours, reference = both_in_turn("drop_in_peft.py", tmp_path)
    assert num_losses(reference) == 5 * 9
    assert_same(ours, reference)
    with UserScript("drop_in_peft.py", "--load", "adapterscuda", cwd=tmp_path) as script:
        alone = script.succeed().splitlines()
    trained = sorted(line for line in ours if " trained " in line)
    assert len(trained) == 5
    assert_same([line.replace(" trained ", " loaded ") for line in trained], sorted(alone))


def test_what_scripts_do_with_adapters_gives_the_losses_of_one_device(both_in_turn, tmp_path):
    ours, reference = both_in_turn("drop_in_peft_adapters.py", tmp_path)
    assert num_losses(reference) == 50
    assert_same(ours, reference)


@pytest.mark.parametrize(
    "script, expected",
    [
        ("drop_in_peft_trainer.py", 20),
        ("drop_in_trl_sft.py", 30),
        ("drop_in_trl_preferences.py", 17),
        ("drop_in_trl_grpo.py", 1),  # the others are below zero
    ],
)
def test_trainers_print_the_numbers_of_one_device(both_in_turn, tmp_path, script, expected):
    ours, reference = both_in_turn(script, tmp_path)
    assert num_losses(reference) == expected
    assert_same(ours, reference)


@pytest.mark.parametrize("name, plan", CASES)
def test_adapters_under_a_plan_are_those_of_one_device(accelerator, name, plan):
    accelerator(plan)
    results = [train(ADAPTED[name], device) for device in ("cpu", "cuda")]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "plan", ["replicate=2", "replicate=2,micro_batches=2", "shard=2,recompute=full", "pipeline=2,micro_batches=2"]
)
def test_a_call_is_computed_with_what_was_set_when_it_was_made(accelerator, plan):
    accelerator(plan)

    def script(device):
        model = lora_llama(lora_dropout=0.9).to(device).eval()
        given = {name: value.to(device) for name, value in batch(0).items()}
        with_adapters = model(**given).loss
        with model.disable_adapter(), torch.no_grad():
            without = model(**given).loss
        model.train()
        (with_adapters - without).backward()
        gradients = {name: p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
        return with_adapters.item(), without.item(), gradients

    expected, got = (script(device) for device in ("cpu", "cuda"))
    assert expected[0] != pytest.approx(expected[1], rel=1e-4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ["replicate=2,precision=bf16", "shard=2,precision=bf16"])
def test_adapters_in_bfloat16_follow_those_in_float32(accelerator, plan):
    accelerator(plan)
    expected, got = (train(lora_llama, device)[0] for device in ("cpu", "cuda"))
    assert got == pytest.approx(expected, rel=2e-2)


def test_a_tensor_axis_splits_adapted_models_and_refuses_dora(accelerator):
    accelerator("tensor=2")
    for name in ("llama", "gpt2"):
        results = [train(ADAPTED[name], device) for device in ("cpu", "cuda")]
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(PlanError, match="failed for PeftModelForCausalLM") as refused:
        train(ADAPTED["llama, DoRA"], "cuda")
    assert re.search(r"\(\w+, dora\.py line \d+, in a worker\)\. Code that computes with a whole", refused.value.fact)
    assert 'plan="shard=2"' in refused.value.fix


def train(make, device: str):
    model: nn.Module = make().to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
    losses = []
    for step in range(3):
        loss = model(**{key: value.to(device) for key, value in batch(step).items()}).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: p.detach().cpu().clone() for key, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "shard=2,micro_batches=2"])
def test_workers_exchange_gradients_of_adapters_alone(team, plan):
    for found in team.run(2, peft_models.exchanged_gradients, plan=plan):
        assert found["frozen"] > 3 * found["trained"] and found["frozen with gradients"] == 0
        steps = 2 if "micro_batches" in plan else 1
        assert found["trained"] <= found["exchanged"] <= 1.1 * steps * found["trained"]


def test_replicas_have_the_same_adapters(team):  # C21
    first, second = team.run(2, peft_models.adapters_of, plan="replicate=2", steps=5)
    assert len(first) == 28
    assert all(torch.equal(value, second[name]) for name, value in first.items())
