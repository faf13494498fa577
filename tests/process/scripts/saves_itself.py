"""Trains a model with dropout and a schedule; goes on from the last automatic checkpoint, as its page shows.

Arguments: the number of steps, the plan ("" for one process without the line), what else it does: "handler" has a
handler of its own for SIGTERM, "evaluates" stays in an evaluation after the twentieth step. Prints a loss a step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch import nn

import moreh_ap

num_steps, plan, ways = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")
if plan:
    torch.moreh.option.enable_advanced_parallelization(plan=None if plan == "own" else plan)
device = "cuda" if plan else "cpu"

torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
rows = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator())
folder, first_step = os.environ.get("MOREH_AUTOSAVE"), 0
if folder and os.path.exists(f"{folder}/checkpoint.json"):
    state = moreh_ap.load(folder, model=model, optimizer=optimizer)
    scheduler.load_state_dict(state["scheduler"])
    first_step = state["steps"]
if "handler" in ways:

    def handler(number, frame):
        print("my handler", flush=True)
        sys.exit(7)

    signal.signal(signal.SIGTERM, handler)


def batches():
    """Rows in an order of each epoch, without the steps that are done."""
    for epoch in range(1000):
        loader.generator.manual_seed(epoch)
        for number, batch in enumerate(loader, epoch * len(loader)):
            if number >= first_step:
                yield batch


for step, batch in zip(range(first_step, num_steps), batches()):
    model.train()
    noise = random.random() + np.random.random() + torch.rand(()).item()
    loss = (model(batch.to(device)) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {step} {loss.item()!r}", flush=True)
    if "evaluates" in ways and step == 20:
        model.eval()
        with torch.no_grad():
            print("evaluates", flush=True)
            for _ in range(600):
                model(batch.to(device))
                time.sleep(0.05)
    scheduler.step()
    time.sleep(float(os.environ.get("SLEEP", "0")))
