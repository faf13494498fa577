"""Which layers outside of blocks are worth a unit of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.parallelizer.data import outer_layers
from moreh_ap.parallelizer.data.outer_layers import LEAST_PARAMETERS
from moreh_ap.planner.cost.training_systems import MOREH_AP


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2.0


def model(embedding=None, rows=2**21, blocks=2):
    parts = {"embedding": embedding or nn.Embedding(rows, 8), "head": nn.Linear(8, rows, bias=False)}
    if blocks:
        parts["blocks"] = nn.ModuleList(nn.Sequential(nn.Linear(8, rows)) for _ in range(blocks))
    return nn.ModuleDict(parts)


def found(root, ignored=()):
    blocks = list(root["blocks"]) if "blocks" in root else []
    names = {id(module): name for name, module in root.named_modules()}
    return [names[id(layer)] for layer in outer_layers.outer_layers(root, blocks, ignored)]


@pytest.fixture(autouse=True)
def without_memory():
    with torch.device("meta"):
        yield


def test_large_layers_beside_blocks_are_units():
    assert found(model()) == ["embedding", "head"]
    assert found(model(rows=2**21 - 1)) == []
    assert found(model(blocks=0)) == []


def test_layers_that_share_or_write_their_weights_are_none():
    tied = model()
    tied["head"].weight = tied["embedding"].weight
    assert found(tied) == []
    assert found(model(nn.Embedding(2**21, 8, max_norm=1.0))) == ["head"]
    assert found(model(Scaled(2**21, 8))) == ["head"]  # a forward of one's own may hand its weight on
    root = model()
    assert found(root, [root["head"].weight]) == ["embedding"]


def test_the_planner_knows_the_size():
    assert MOREH_AP.outer_unit_parameters == LEAST_PARAMETERS
