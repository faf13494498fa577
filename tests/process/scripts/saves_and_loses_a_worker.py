"""Has a worker killed while it writes a checkpoint in the background. Argument: the folder."""

from __future__ import annotations

import os
import signal
import sys

import torch

import moreh_ap
from moreh_ap import device

torch.moreh.option.enable_advanced_parallelization(plan="shard=2", recovery="memory")
model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024)).cuda()
model(torch.ones(2, 1024).cuda()).sum().item()
moreh_ap.save(sys.argv[1], model=model, extra={"step": 0}).result()
session = device.current().session
before = model[0].weight.detach().cpu()
save = moreh_ap.save(sys.argv[1], model=model, extra={"step": 1}, background=True)
session.outbox.flush()
session.synchronize()  # the workers have copied, and write
with torch.no_grad():
    model[0].weight.mul_(2.0)
os.kill(session.workers.pids[1], signal.SIGKILL)
save.result(timeout=120)
saved = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
assert moreh_ap.load(sys.argv[1], model=saved)["step"] == 1
assert torch.equal(model[0].weight.cpu(), 2.0 * before)
print("saved as it was" if torch.equal(saved[0].weight, before) else "saved as it became")
print("goes on:", model(torch.ones(2, 1024).cuda()).sum().item() is not None)
moreh_ap.save(sys.argv[1], model=model, extra={"step": 2}, background=True)
