"""Trains a small network with the 8-bit and paged optimizers of bitsandbytes.

With --ap it has the one line; prints losses.
"""

import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

import bitsandbytes as bnb
from torch import nn


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for make in (bnb.optim.AdamW8bit, bnb.optim.Adam32bit):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 8)).to(device)
        optimizer = make(model.parameters(), lr=1e-2)
        for _ in range(4):
            classes = torch.randint(0, 8, (16,))
            rows = torch.randn(16, 32) + classes[:, None] / 4
            loss = nn.functional.cross_entropy(model(rows.to(device)), classes.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.6f} with {make.__name__}")


if __name__ == "__main__":
    main()
