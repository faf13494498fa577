"""What is remembered of verifications, and what counts as equal."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.errors import PlanError
from moreh_ap.integrations.transformers_reduced import VOCABULARY, reduce_config
from moreh_ap.local import cache_files
from moreh_ap.plan import Plan
from moreh_ap.planner.search import verified_kinds
from moreh_ap.session.planning import first_call
from moreh_ap.session.verification import equivalence, reduced_model, verified_models
from moreh_ap.session.verification.equivalence import Equivalence, Subject


def test_a_part_of_the_users_own_makes_it_another_family():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)
    assert first_call.family_of(model) in verified_kinds.verified_kinds()
    assert reduced_model.is_from_configuration(model)

    class Own(nn.Linear):
        pass

    model.lm_head = Own(64, 300, bias=False)
    assert first_call.family_of(model) == ""
    assert not reduced_model.is_from_configuration(model)


def test_a_configuration_keeps_heads_and_every_kind_of_block():
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma2", num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=26)
    small = reduce_config(config, 1)
    assert (small.num_attention_heads, small.num_key_value_heads) == (8, 4)
    assert small.num_hidden_layers == len(small.layer_types) == len(set(config.layer_types)) == 2
    assert small.hidden_size == 8 * small.head_dim
    assert small.vocab_size == VOCABULARY
    assert config.num_hidden_layers == 26, "the model's own is not touched"


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


class Stack(nn.Module):
    """Linear layers with dropout, which a copy must not have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(6))
        self.tied = self.blocks[0][0]
        self.p_drop = 0.5

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return nn.functional.dropout(self.tied(x), self.p_drop, self.training)


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


def test_what_counts_as_equal():
    model = Stack()
    _, expected = reduced_model.reduce_call(model, (model, (torch.randn(3, 4),), {}), rows=2, depth=2)
    plan = Plan(tensor=2)
    assert equivalence.compare(expected, expected, plan).is_verified
    name = next(iter(expected.gradients))
    scaled = {key: 1.001 * value for key, value in expected.gradients.items()}
    for changed, word in (
        (replace(expected, gradients=scaled), "the gradient of"),
        (replace(expected, losses=[loss * 1.0001 for loss in expected.losses]), "a loss"),
        (replace(expected, norms=[float("nan")] * len(expected.norms)), "a gradient norm"),
        (replace(expected, weights={key: value + 1 for key, value in expected.weights.items()}), "the weight"),
        (replace(expected, gradients={}), "only one side has a gradient"),
        (replace(expected, gradients={**expected.gradients, name: torch.zeros(1)}), "has the shape"),
    ):
        found = equivalence.compare(changed, expected, plan)
        assert found.verdict == "wrong"
        assert word in found.reason


def test_a_model_without_numbers_to_compare_is_refused():
    class Endless(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() / 0.0

    subject = Subject(Endless(2, 2), (((torch.ones(2, 2),), {}),))
    with pytest.raises(PlanError, match="in one process the losses are"):
        equivalence.reference(subject)


def test_what_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_files.FOLDER_VARIABLE, str(tmp_path / "deep" / "cache"))
    model, found = Stack(), Equivalence("tensor=2", "verified", loss=1e-7, norm=0.0, gradient=0.0, weight=0.0)
    key = verified_models.key_of(model, "", "x", Plan(tensor=2))
    assert verified_models.look_up(key) is None
    verified_models.keep(key, "Stack", found)
    assert verified_models.look_up(key) == found
    assert json.loads(verified_models.FILE.path.read_text())[key]["model"] == "Stack"
    key_of = verified_models.key_of
    others = {key_of(Stack(), "", "x", Plan(tensor=4)), key_of(Stack(), "", "y", Plan(tensor=2))}
    wider = Stack()
    wider.blocks.append(nn.Linear(4, 4))
    others.add(verified_models.key_of(wider, "", "x", Plan(tensor=2)))
    assert len(others) == 3 and key not in others
    assert verified_models.key_of(Stack(), "", "x", Plan(tensor=2)) == key
    verified_models.FILE.path.write_text("[1")
    assert verified_models.look_up(key) is None
    verified_models.keep(key, "Stack", found)
    assert verified_models.look_up(key) == found


def test_a_trial_is_in_float32_with_even_stages():
    plan = Plan(pipeline=2, layers=(10, 20), precision="bf16", recompute=7, tensor=2)
    trial = first_call.plan_for_trial(plan)
    assert (trial.layers, trial.precision, trial.recompute) == ((), "fp32", 1)
    assert reduced_model.depth_for(trial) == 2 and reduced_model.depth_for(plan) == 30
    assert reduced_model.rows_for(trial) == plan.micro_batches


def test_loss_of_results():
    x = torch.ones(3, requires_grad=True) * 2
    assert equivalence.loss_of({"logits": x, "loss": x.sum()}) == 6
    assert equivalence.loss_of(SimpleNamespace(loss=x.sum())) == 6
    assert equivalence.loss_of((x, x.sum())) == 6
    assert equivalence.loss_of(x) == 4
    with pytest.raises(PlanError, match="no tensor that depends"):
        equivalence.loss_of(torch.ones(3))
