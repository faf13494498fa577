"""Which attributes of a model's own parts a forward has changed."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.protocol.module_attributes import Attributes


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
