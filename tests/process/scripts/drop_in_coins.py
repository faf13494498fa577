"""Coins that a forward flips with Python's and NumPy's random numbers: LayerDrop, masks, self-conditioning."""

import random
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)

torch.manual_seed(0)
np.random.seed(0)
random.seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.dropout(torch.relu(self.linear(self.norm(x))))
        return x * (1 + random.random() / 10) if self.training else x


class LayerDropEncoder(nn.Module):
    """As in fairseq: a layer is skipped where NumPy's coin falls so."""

    def __init__(self, width=12, layerdrop=0.4):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(width) for _ in range(3)), nn.Linear(width, 4)
        self.layerdrop = layerdrop

    def forward(self, x):
        for layer in self.layers:
            if not self.training or np.random.uniform(0, 1) > self.layerdrop:
                x = layer(x)
        return self.head(x)


class SelfConditioned(nn.Module):
    """As in denoising diffusion: half of the steps see a first guess. Each row may have a mask of its own."""

    def __init__(self, width=12):
        super().__init__()
        self.net = nn.Linear(2 * width, width)

    def forward(self, x, mask_rows=False):
        guess = torch.zeros_like(x)
        if random.random() < 0.5:
            with torch.no_grad():
                guess = self.net(torch.cat([x, guess], dim=1))
        if mask_rows:
            x = x.clone()
            for row in range(len(x)):
                start = np.random.randint(0, 8)
                x[row, start : start + 4] = 0
        return F.mse_loss(self.net(torch.cat([x, guess], dim=1)), x)


encoder = LayerDropEncoder().to(device)
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-2)
for _ in range(6):
    x, y = torch.randn(7, 12).to(device), torch.randint(0, 4, (7,)).to(device)
    loss = F.cross_entropy(encoder(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"layer drop loss {loss.item():.6f}")

conditioned = SelfConditioned().to(device)
optimizer = torch.optim.Adam(conditioned.parameters(), lr=1e-2)
for step in range(8):
    loss = conditioned(torch.randn(6, 12).to(device), mask_rows=step > 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"self-conditioned loss {loss.item():.6f}")
print(f"after {random.random():.6f} {np.random.rand():.6f} {torch.rand(()).item():.6f}")
