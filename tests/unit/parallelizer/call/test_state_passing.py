"""Which attributes that forwards have set are passed with a call."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.call.state_passing import with_tensors


def test_an_attribute_that_is_a_number_now_is_not_passed():
    model = nn.Sequential(nn.Linear(2, 2))
    model.hidden, model.count, model[0].states = torch.zeros(3, 2), 1.5, [torch.zeros(3), None]
    assert with_tensors(model, ["hidden", "count", "0.states", "removed"]) == {"hidden", "0.states"}
