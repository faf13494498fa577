"""Trains a small model for 16 steps: with a stall that a trace shows, with Ctrl-C, or in the script's own process."""

import signal
import sys
import time

import torch
from torch import nn

stall = sys.argv[1]
workers = {} if stall == "own-process" else {"plan": "replicate=2"}
torch.moreh.option.enable_advanced_parallelization(**workers)


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return 16 * 8

    def __getitem__(self, index):
        if stall == "loader":
            time.sleep(0.02)  # stands for reading and decoding a picture
        return torch.full((64,), index / 128), index % 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))

    def forward(self, pictures, targets):
        if stall == "item":
            time.sleep(0.05)  # stands for a larger model
        return nn.functional.cross_entropy(self.layers(pictures), targets)


# --8<-- [start:loop]
model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())
total = 0.0
for number, (pictures, targets) in enumerate(torch.utils.data.DataLoader(Pictures(), batch_size=8), start=1):
    loss = model(pictures.cuda(), targets.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if stall == "item":
        total += loss.item()  # waits in every step
    # --8<-- [end:loop]
    if stall == "ctrl-c" and number == 14:
        signal.raise_signal(signal.SIGINT)
print("trained")
