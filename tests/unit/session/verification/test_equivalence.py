"""Which differences between two trainings count, and which loss of a result is trained."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.session.verification import equivalence, reduced_model
from moreh_ap.session.verification.equivalence import Subject
from unit.session.verification.samples import Stack


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


def test_a_mask_of_infinities_is_compared_by_its_other_numbers():
    mask = torch.tensor([0.0, -float("inf"), 2.0])
    assert equivalence.worst({"mask": mask.clone()}, {"mask": mask}, 1e-3) == (0.0, "mask")
    assert equivalence.worst({"mask": mask + 1}, {"mask": mask}, 1e-3) == (0.5, "mask")
    for other in (mask.nan_to_num(), mask.nan_to_num(neginf=float("inf")), mask * float("nan")):
        assert equivalence.worst({"mask": other}, {"mask": mask}, 1e-3) == (float("inf"), "mask")


def test_a_model_without_numbers_to_compare_is_refused():
    class Endless(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum() / 0.0

    subject = Subject(Endless(2, 2), (((torch.ones(2, 2),), {}),))
    with pytest.raises(PlanError, match="in one process the losses are"):
        equivalence.reference(subject)


def test_loss_of_results():
    x = torch.ones(3, requires_grad=True) * 2
    assert equivalence.loss_of({"logits": x, "loss": x.sum()}) == 6
    assert equivalence.loss_of(SimpleNamespace(loss=x.sum())) == 6
    assert equivalence.loss_of((x, x.sum())) == 6
    assert equivalence.loss_of(x) == 4
    with pytest.raises(PlanError, match="no tensor that depends"):
        equivalence.loss_of(torch.ones(3))
