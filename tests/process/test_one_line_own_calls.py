"""Models whose class has a `__call__` of its own: what it does beside the forward is done once, in the script."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn


class Block(nn.Module):
    """A layer that is called as the model is, inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + x

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Scaling(nn.Module):
    """Scales its input and shifts its output around the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2) + 1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.last(hidden)


PLANS = rotating_from(1, ["replicate=2", "shard=2", "shard=2,micro_batches=2", "pipeline=2,micro_batches=2"])


@pytest.mark.parametrize("plan", PLANS)
def test_a_call_of_its_own(accelerator, plan):
    accelerator(plan)

    def script(device: str) -> Any:
        model = Scaling().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator, losses = torch.Generator().manual_seed(1), []
        for _ in range(4):
            x, y = (torch.randn(8, size, generator=generator).to(device) for size in (6, 2))
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        part = model.blocks[0](torch.ones(4, 12).to(device)) if "pipeline" not in plan else None
        return losses, model.state_dict(), part

    assert_same(*on_both(script))
