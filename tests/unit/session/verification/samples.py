"""Models that verifications are tried with."""

from __future__ import annotations

from torch import nn


class Stack(nn.Module):
    """Linear layers with dropout, which a copy must not have."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(6))
        self.tied = self.blocks[0][0]
        self.p_drop = 0.5

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return nn.functional.dropout(self.tied(x), self.p_drop, self.training)
