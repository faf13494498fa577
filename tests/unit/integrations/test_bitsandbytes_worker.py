"""What a worker does to layers of bitsandbytes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import nn

from moreh_ap.integrations import bitsandbytes_worker


def test_in_a_worker_a_layer_finds_its_constants_on_an_ordinary_parameter(monkeypatch):
    class Linear4bit(nn.Linear):
        support_avx512bf16_for_cpu = True

        def forward(self, rows):
            return rows + self.weight.quant_state.absmax

    modules = SimpleNamespace(Linear4bit=Linear4bit)
    model = nn.Sequential(nn.Linear(2, 2), Linear4bit(2, 2))
    model[1].quant_state = SimpleNamespace(absmax=torch.tensor(4.0))
    bitsandbytes_worker.complete_unpickled(model)  # the library was not imported
    assert not model[1]._forward_pre_hooks
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn.modules", modules)
    bitsandbytes_worker.complete_unpickled(model)
    weight = model[1].weight
    assert model[1](torch.ones(2)).tolist() == [5.0, 5.0]
    assert model[1].weight is weight and not model[1].support_avx512bf16_for_cpu and not model[0]._forward_pre_hooks
