"""Which parameters of a script's model the planner takes for trained, and how frozen ones are kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.planner.profiles.model_profile import Frozen
from moreh_ap.session.planning.frozen_weights import trains_weights
from moreh_ap.session.planning.model_profiling import profile_model, shape_of

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.zeros(8, 16, dtype=torch.long)


def adapted(dtype=torch.float32, **settings):
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    settings = {"target_modules": "all-linear", "r": 2, **settings}
    return peft.get_peft_model(transformers.LlamaForCausalLM(config).to(dtype), peft.LoraConfig(**settings))


def trained_of(profile) -> list[float]:
    return [profile.first.trained_parameters, profile.num_blocks * profile.block.trained_parameters,
            profile.last.trained_parameters]  # fmt: skip


def count(model: nn.Module, *, trained: bool) -> int:
    return sum(one.numel() for one in model.parameters() if one.requires_grad is trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_of_a_decoder_are_what_is_trained(dtype):
    model = adapted(dtype)
    shape = shape_of(model)
    assert shape is not None and not trains_weights(model)
    found = profile_model(model, shape, (model, (), {"input_ids": IDS}), 8)
    assert trained_of(found) == [0.0, count(model, trained=True), 0.0]
    assert found.parameters == count(model, trained=True) + count(model, trained=False)
    assert found.frozen == Frozen(float(dtype.itemsize), float(dtype.itemsize))


def test_what_is_trained_outside_of_blocks_is_counted_there():
    model = adapted()
    model.get_submodule("base_model.model.model.norm").weight.requires_grad_()
    found = profile_model(model, shape_of(model), (model, (), {"input_ids": IDS}), 8)
    assert trained_of(found)[2] == 128


def test_a_counted_model_without_blocks_trains_its_head():
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)], nn.Linear(64, 10))
    model[:6].requires_grad_(False)
    found = profile_model(model, None, (model, (torch.zeros(8, 64),), {}), 8)
    assert trained_of(found) == [0.0, 650.0, 0.0] and found.frozen == Frozen(4.0, 4.0)


def test_a_model_of_which_much_is_trained_counts_as_trained():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    assert profile_model(model, None, (model, (torch.zeros(8, 64),), {}), 8).frozen is None
