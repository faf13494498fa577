"""Loads a checkpoint under a plan, calls the model once, and prints the peak resident memory of every worker.

    python load_under_plan.py FOLDER PLAN
"""

import sys
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

folder, plan = sys.argv[1:]
torch.moreh.option.enable_advanced_parallelization(plan=plan, mixed_precision=False)
model = AutoModelForCausalLM.from_pretrained(folder).cuda()
ids = torch.zeros(4, 2, dtype=torch.long).cuda()
with torch.no_grad():
    model(input_ids=ids).logits.cpu()


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


workers = [child for child in psutil.Process().children(recursive=True) if "bootstrap" in " ".join(child.cmdline())]
for worker in workers:
    print("worker peak", peak_bytes(worker.pid))
