"""Saves in the background and ends at once. Arguments: the folder, a plan, "full" to have no space on the disk."""

from __future__ import annotations

import resource
import sys

import torch

import moreh_ap
from moreh_ap import device

folder, plan, disk = sys.argv[1:]
if plan:
    torch.moreh.option.enable_advanced_parallelization(plan=plan)
model = torch.nn.Linear(1024, 1024)
model = model.cuda() if plan else model
model(torch.ones(2, 1024).to(model.weight.device)).sum().item()
moreh_ap.save(folder, model=model, extra={"weight": model.weight.sum().item()}, keep=1).result()
with torch.no_grad():
    model.weight.add_(1)
if disk == "full":
    for pid in device.current().session.workers.pids if plan else [0]:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
moreh_ap.save(folder, model=model, extra={"weight": model.weight.sum().item()}, background=True)
with torch.no_grad():
    model.weight.add_(1)
print("the end")
