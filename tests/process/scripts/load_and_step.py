"""Loads one checkpoint after the other, trains a step, and prints the most memory that this process ever used so far.

python load_and_step.py FOLDER...
"""

import re
import sys

import torch
from transformers import AutoModelForCausalLM

torch.moreh.option.enable_advanced_parallelization(plan="shard=2")
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ids = torch.arange(8).reshape(2, 4)
    loss = model(ids.cuda(), labels=ids.cuda()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item(), "parameters", sum(parameter.numel() for parameter in model.parameters()))
    with open("/proc/self/status") as status:
        print("peak", re.search(r"VmHWM:\s+(\d+) kB", status.read())[1])
