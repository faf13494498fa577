"""Trains one step after another and saves each, until it is killed; prints the step of every save that has returned.

Arguments: the folder, a plan ("" for one process without the line), "background" or "". What it finds in the folder it
goes on from. Every weight is the number of steps, and the momentum follows from it, so that a checkpoint of two saves
would show.
"""

from __future__ import annotations

import os
import sys

import torch

import moreh_ap

folder, plan, background = sys.argv[1:]
if plan:
    torch.moreh.option.enable_advanced_parallelization(plan=plan)
model = torch.nn.Linear(64, 64, bias=False)
model = model.cuda() if plan else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
step = 0
if os.path.exists(f"{folder}/checkpoint.json"):
    step = moreh_ap.load(folder, model=model, optimizer=optimizer)["step"]
options = {"background": True} if background else {}
x = torch.eye(64)[:2].repeat(32, 1)
while True:
    model(x.to(model.weight.device)).sum().backward()
    for parameter in model.parameters():
        parameter.grad.fill_(-1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    with torch.no_grad():
        model.weight.fill_(step)
    moreh_ap.save(folder, model=model, optimizer=optimizer, extra={"step": step}, **options)
    print(step, flush=True)
