"""Loads a checkpoint under a plan, calls the model once, and prints the peak resident memory of every worker.

python load_under_plan.py FOLDER PLAN
"""

import sys
from pathlib import Path

import psutil
import torch


def print_worker_peaks() -> None:
    """Prints a line for each worker of this process."""
    for child in psutil.Process().children(recursive=True):
        if "bootstrap" in " ".join(child.cmdline()):
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
            print("worker peak", int(peak) * 1024)


def main() -> None:
    from transformers import AutoModelForCausalLM

    folder, plan = sys.argv[1:]
    torch.moreh.option.enable_advanced_parallelization(plan=plan, mixed_precision=False)
    model = AutoModelForCausalLM.from_pretrained(folder).cuda()
    ids = torch.zeros(4, 2, dtype=torch.long).cuda()
    with torch.no_grad():
        model(input_ids=ids).logits.cpu()
    print_worker_peaks()


if __name__ == "__main__":
    main()
