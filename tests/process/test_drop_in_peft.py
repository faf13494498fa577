"""PEFT and TRL with the one line: whole scripts, adapters under every plan, and what is refused."""

from __future__ import annotations

from functools import partial

import peft_models
import pytest
import torch
from drop_in_runs import assert_same, both, num_losses
from peft_models import batch, lora_gpt2, lora_llama
from torch import nn
from user_script import UserScript

pytest.importorskip("peft")
pytest.importorskip("trl")

ADAPTED = {
    "llama": lora_llama,
    "llama, all layers": partial(lora_llama, target_modules="all-linear"),
    "llama, DoRA": partial(lora_llama, use_dora=True),
    "llama, head trained": partial(lora_llama, modules_to_save=["lm_head"]),
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


def test_adapters_of_five_families_are_trained_saved_and_loaded_as_on_one_device(tmp_path):
    ours, reference = both("drop_in_peft.py", tmp_path)
    assert num_losses(reference) == 5 * 10
    assert_same(ours, reference)
    with UserScript("drop_in_peft.py", "--load", "adapterscuda", cwd=tmp_path) as script:
        alone = script.succeed().splitlines()
    assert len(alone) == 5
    assert_same([line for line in ours if " loaded " in line], alone)


def test_what_scripts_do_with_adapters_gives_the_losses_of_one_device(tmp_path):
    ours, reference = both("drop_in_peft_adapters.py", tmp_path)
    assert num_losses(reference) == 50
    assert_same(ours, reference)


@pytest.mark.parametrize(
    "script, expected",
    [("drop_in_peft_trainer.py", 20), ("drop_in_trl_sft.py", 30), ("drop_in_trl_preferences.py", 17)],
)
def test_trainers_print_the_numbers_of_one_device(tmp_path, script, expected):
    ours, reference = both(script, tmp_path)
    assert num_losses(reference) == expected
    assert_same(ours, reference)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_under_a_plan_are_those_of_one_device(accelerator, name, plan):
    accelerator(plan)
    results = [train(ADAPTED[name], device) for device in ("cpu", "cuda")]
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


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


def test_replicas_have_the_same_adapters(team):  # C21
    first, second = team.run(2, peft_models.adapters_of, plan="replicate=2", steps=5)
    assert len(first) == 28
    assert all(torch.equal(value, second[name]) for name, value in first.items())
