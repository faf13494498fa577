"""What a forward adds to modules, and that it can be taken back."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.protocol.added_members import Members


def test_what_was_added_is_named_and_taken_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("centre", None)
    model.register_parameter("gain", None)
    last = model[1]
    members = Members(model)
    assert members.added() == ()
    model[0].head = nn.Linear(2, 2)
    model[1] = nn.Linear(2, 2)
    model.centre, model.gain = torch.zeros(2), nn.Parameter(torch.zeros(2))
    last.register_forward_hook(lambda *args: None)
    assert members.added() == ("1", "gain", "centre", "0.head", "a hook on 1")
    members.take_back()
    assert members.added() == () and model[1] is last and model.centre is None and model.gain is None
    assert not last._forward_hooks and not hasattr(model[0], "head")


def test_tensors_in_place_of_others_are_not_added():
    model = nn.BatchNorm1d(2)
    members = Members(model)
    model.running_mean, model.weight = torch.ones(2), nn.Parameter(torch.zeros(2))
    assert members.added() == ()
