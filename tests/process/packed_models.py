"""A model with weights that are packed into bytes, and what each process of a team holds of it."""

from __future__ import annotations

from typing import Any

import torch
from parallelizer_jobs import CPU, Runner
from torch import Tensor, nn

from moreh_ap.parallelizer.data.fsdp import settle
from moreh_ap.parallelizer.state.loading import full_tensor, local_shard
from moreh_ap.plan import Plan

WIDTH = 16


class PackedLinear(nn.Module):
    """Two weights of 4 bits in a byte, frozen, with a low-rank product beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randint(0, 256, (WIDTH * WIDTH // 2, 1), dtype=torch.uint8), requires_grad=False
        )
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, rows: Tensor) -> Tensor:
        high, low = self.weight >> 4, self.weight & 15
        unpacked = (torch.cat((high, low), 1).reshape(WIDTH, WIDTH).float() - 7.5) / 16
        return torch.tanh(rows @ unpacked.T + rows @ self.down.T @ self.up.T)


class Block(nn.Module):
    """A layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = PackedLinear()

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.linear(rows)


class PackedModel(nn.Module):
    """Four equal blocks, and the mean of squares as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return rows.square().mean()


def trained(rank: int, world: int, plan: str) -> dict[str, Any]:
    """Returns losses and adapters of three steps, and the packed bytes as they are held here and as a whole."""
    torch.manual_seed(1)
    runner = Runner(PackedModel().train(), Plan.parse(plan))
    optimizer = torch.optim.AdamW([p for p in runner.model.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)
    losses = []
    for step in range(3):
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        forward = runner.call({"rows": rows.to(CPU)})
        losses.append(float(runner.value(forward)))
        forward.backward(runner.loss_gradient(forward))
        optimizer.step()
        optimizer.zero_grad()
    settle(runner.model)
    parameters = dict(runner.model.named_parameters())
    packed = [one for one in parameters.values() if not one.requires_grad]
    return {
        "losses": losses,
        "held": sum(local_shard(one).numel() for one in packed),
        "packed": [full_tensor(one) for one in packed],
        "adapters": {name: full_tensor(one) for name, one in parameters.items() if one.requires_grad},
    }
