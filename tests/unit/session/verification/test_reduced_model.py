"""Copies of models and calls that are small enough to be compared."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from moreh_ap.integrations.transformers_reduced import VOCABULARY
from moreh_ap.plan import Plan
from moreh_ap.session.verification import equivalence, reduced_model
from unit.session.verification.samples import Stack


def test_long_calls_are_cut_where_there_are_targets():
    labels = torch.full((2, 300), -100)
    labels[:, 250:260] = 7
    ids = torch.arange(600).view(2, 300)
    (), kept = reduced_model._shorten((), {"input_ids": ids, "labels": labels})
    assert kept["input_ids"].shape == kept["labels"].shape == (2, reduced_model._LONGEST)
    assert (kept["labels"] == 7).sum() == 20
    (), fitted = reduced_model._fit_into_vocabulary((), {**kept, "position_ids": ids}, VOCABULARY)
    assert int(fitted["input_ids"].max()) < VOCABULARY
    assert torch.equal(fitted["position_ids"], ids)
    assert torch.equal(fitted["labels"], kept["labels"])
    (), rows = reduced_model._with_rows((), fitted, 5)
    assert torch.equal(rows["labels"][4], fitted["labels"][0])


def test_a_copy_is_short_calm_and_apart():
    model, x = Stack(), torch.randn(3, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    stream = torch.get_rng_state()
    subject, training = reduced_model.reduce_call(model, (model, (x,), {}), rows=4, depth=2)
    assert len(subject.module.blocks) == 2
    assert subject.module.tied is subject.module.blocks[0][0]
    assert subject.calls[0][0][0].shape == (4, 4)
    assert training.losses == equivalence.reference(subject).losses
    assert torch.equal(stream, torch.get_rng_state())
    assert len(model.blocks) == 6 and model.p_drop == 0.5
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_copy_is_made_from_a_configuration_only_where_every_part_is_the_library_s():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    assert reduced_model.is_from_configuration(model)

    class Own(nn.Linear):
        pass

    model.lm_head = Own(64, 300, bias=False)
    assert not reduced_model.is_from_configuration(model)


def test_a_copy_has_a_block_for_each_stage_and_a_row_for_each_part_of_the_batch():
    plan = Plan(pipeline=2, layers=(10, 20), precision="bf16", recompute=7, tensor=2)
    even = replace(plan, layers=(), recompute=1)
    assert reduced_model.depth_for(even) == 2 and reduced_model.depth_for(plan) == 30
    assert reduced_model.rows_for(even) == plan.micro_batches
