"""Which model a plan was verified for, and the plan that is tried at the first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.errors import UnsupportedError
from moreh_ap.plan import Plan
from moreh_ap.planner.search import verified_kinds
from moreh_ap.session.planning import first_call
from moreh_ap.session.verification import reduced_model


def test_a_part_of_the_users_own_makes_it_another_family():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    assert first_call.family_of(model) in verified_kinds.verified_kinds()

    class Own(nn.Linear):
        pass

    model.lm_head = Own(64, 300, bias=False)
    assert first_call.family_of(model) == ""


def test_a_trial_is_in_float32_with_even_stages():
    plan = Plan(pipeline=2, layers=(10, 20), precision="bf16", recompute=7, tensor=2)
    trial = first_call.plan_for_trial(plan)
    assert (trial.layers, trial.precision, trial.recompute) == ((), "fp32", 1)
    assert reduced_model.depth_for(trial) == 2 and reduced_model.rows_for(trial) == plan.micro_batches


def test_a_nested_tensor_among_the_arguments_is_refused_with_what_works_instead():
    rows = [torch.zeros(2, 3), torch.zeros(1, 3)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    first_call.refuse_nested((nn.Linear(3, 1), (rows,), {}))
    with pytest.raises(UnsupportedError, match=r"Linear is called with a nested tensor(.|\n)*to_padded_tensor"):
        first_call.refuse_nested((nn.Linear(3, 1), ([nested],), {}))
