"""Where a model uses its parameters, and forwards that no pipeline can cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moreh_ap.errors import PlanError
from moreh_ap.parallelizer.pipeline.trace import trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def opened(block: nn.Module, x: Tensor) -> Tensor:
    return x + block.linear(block.norm(x))


class Model(nn.Module):
    """Three blocks, through which the forward goes as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.way == "opened" and number == 1:
                x = opened(block, x)
            elif self.way == "forward":
                x = block.forward(x)
            elif self.way != "fewer" or number < 2:
                x = block(x)
        for block in self.blocks if self.way == "again" else ():
            x = block(x)
        if self.way == "penalty":
            x = x + sum(one.square().sum() for one in self.blocks[1].parameters())
        return x


def traced(way: str) -> object:
    return trace(Model(way).to("meta"), (torch.ones(2, 4),), {}, torch.device("cpu"))


def test_a_parameter_is_held_where_it_is_used():
    found = traced("penalty")
    assert found.places["blocks.1.linear.weight"] == {1, 3} and found.places["blocks.2.linear.weight"] == {2}
    assert found.direct == {name for name in found.places if name.startswith("blocks.1.")}


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("opened", r"a part of a block \(blocks.1.norm\) is called outside of its block"),
        ("forward", r"a part of a block \(blocks.0.norm\) is called outside of its block"),
        ("again", "its forward calls block 0 where block 3 is next"),
        ("fewer", "its forward does not call block 2 of blocks"),
    ],
)
def test_a_forward_that_does_not_call_its_blocks_one_after_the_other_is_refused(way: str, reason: str):
    with pytest.raises(PlanError, match=f"a pipeline cannot cut Model: {reason}"):
        traced(way)
