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
save = moreh_ap.save(sys.argv[1], model=model, extra={"step": 1}, background=True)
session.outbox.flush()
session.synchronize()  # the workers have copied, and write
os.kill(session.workers.pids[1], signal.SIGKILL)
try:
    save.result(timeout=120)
    print("saved")
except OSError as error:
    print("not saved:", error)
print("goes on:", model(torch.ones(2, 1024).cuda()).sum().item() is not None)
moreh_ap.save(sys.argv[1], model=model, extra={"step": 2}, background=True)
