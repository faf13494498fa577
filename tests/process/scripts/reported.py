"""Trains with a loss that is read every fifth step; ends with an error if asked to."""

import sys

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        return self.last(self.first(x).relu())


torch.moreh.option.enable_advanced_parallelization(plan="replicate=2", report="report")
torch.manual_seed(0)
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    x = torch.randn(16, 256).cuda()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"loss {loss.item()}")
if len(sys.argv) > 2:
    raise ValueError("the script has an error")
