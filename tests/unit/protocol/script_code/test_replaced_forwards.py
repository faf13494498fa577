"""Forwards that are not the class's."""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

from moreh_ap.protocol.script_code.replaced_forwards import has_another_forward


def test_wrapping_a_forward_is_not_replacing_it():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert not has_another_forward(model)
    model[0].forward = types.MethodType(torch.autocast("cpu")(nn.Linear.forward), model[0])
    assert not has_another_forward(model)

    @functools.wraps(nn.Linear.forward)
    def own(self, x):
        return x @ self.weight.T

    model[0].forward = types.MethodType(torch.autocast("cpu")(own), model[0])
    assert has_another_forward(model)
