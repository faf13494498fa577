"""Calls of modules, seen for a time."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.parallelizer.observation.module_calls import module_step, seeing_modules


def test_every_call_inside_and_none_afterwards():
    before = nn.Module.__call__
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []

    def on_module(call, module, args, kwargs):
        seen.append(module_step(module))
        return call(*args, **kwargs)

    with seeing_modules(on_module):
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert seen == ["module Sequential", "module Linear", "module ReLU"]
    assert nn.Module.__call__ is before
