"""Trains a model of one block that the inductor compiles: with the one line by `torch.compile(model)`, else by hand."""

import sys

import torch
from torch import nn

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization(plan="replicate=1")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block()]), nn.Linear(8, 1)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        print("graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return self.head(hidden).square().mean()


torch.manual_seed(0)
device = "cuda" if "--ap" in sys.argv else "cpu"
model = Model().to(device)
if "--ap" in sys.argv:
    model = torch.compile(model)
else:
    for block in model.blocks:
        block.compile()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.full((4, 8), 1.0 + step).to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
