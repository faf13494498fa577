"""Trains until something happens: a signal from outside, or after five steps what the first argument says."""

import sys

import torch
from torch import nn

ending = sys.argv[1] if len(sys.argv) > 1 else "never"
torch.moreh.option.enable_advanced_parallelization(distribute_parameter=False)  # so that it stays on the workers
print("the line is behind us")
layers = nn.Linear(64, 1600), nn.ReLU(), nn.Linear(1600, 1600), nn.ReLU(), nn.Linear(1600, 1)
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = 0
while True:
    loss = model(torch.randn(32, 64).cuda()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        print("step", step, loss.item())
        if ending == "exit":
            sys.exit(3)
        if ending == "raise":
            raise LookupError("nothing was found")
        if ending == "return":
            break
