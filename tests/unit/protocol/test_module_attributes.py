"""Which attributes of a model's own parts a forward has changed."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.protocol.module_attributes import Attributes, computed_by_hooks


class Irreps(tuple):
    """As e3nn has it: how many entries it has is another question than its length."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_of_a_library_without_a_length_is_compared_by_identity():
    model = nn.Module()
    model.__class__ = type("Product", (nn.Module,), {"__module__": "script"})
    model.irreps, model.parts = Irreps([1, 2]), (Irreps([3]), torch.ones(1))
    attributes = Attributes(model)
    before = attributes.marks()
    assert attributes.changed(before) == {}
    model.irreps = Irreps([1, 2])
    assert list(attributes.changed(before)) == ["irreps"]


def test_a_buffer_is_looked_at_from_when_it_first_carries_a_graph():
    model = nn.Module()
    model.__class__ = type("Neuron", (nn.Module,), {"__module__": "script"})
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("potential", torch.zeros(2))
    model.register_buffer("none", None)
    without, attributes = Attributes(model), Attributes(model, with_buffers=True)
    before = attributes.marks()
    model.mean = torch.ones(2)
    assert attributes.changed(before) == {}
    model.potential = torch.ones(2, requires_grad=True) * 2
    assert list(attributes.changed(before)) == ["potential"]
    assert without.changed(before) == {}
    before = attributes.marks()
    assert attributes.changed(before) == {}
    model.potential = torch.zeros(2)  # as without gradients
    assert list(attributes.changed(before)) == ["potential"]


def test_a_weight_that_a_hook_of_pytorch_computes_is_looked_at():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[1].kept = torch.ones(1)
    attributes = Attributes(model)
    before = attributes.marks()
    model(torch.ones(1, 2))
    assert list(attributes.changed(before)) == ["0.weight"] == sorted(computed_by_hooks(model))
