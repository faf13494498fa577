"""Processes and threads that a script starts for itself once the workers are there."""

import multiprocessing
import os
import subprocess
import sys
import threading

import torch
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        where = torch.cuda.is_available()  # in a loader process the machine is what it is
        return {"x": torch.full((4,), float(index)), "accelerator": torch.tensor(where)}


def double(row):
    with open("mapped", "a") as file:
        file.write(".")
    return {"twice": 2 * row["n"]}


def square(number):
    return int(torch.tensor(number) ** 2)


torch.moreh.option.enable_advanced_parallelization(mixed_precision=False)
model = nn.Linear(4, 2).cuda()
model(torch.ones(4, 4).cuda()).sum().item()

loader = DataLoader(Squares(), batch_size=4, num_workers=2, pin_memory=True, persistent_workers=True)
for _ in range(2):
    seen = list(loader)
    rows = torch.cat([batch["x"][:, 0] for batch in seen])
    assert rows.tolist() == list(range(12)), rows
    model(seen[0]["x"].cuda(non_blocking=True)).sum().backward()
print("loader processes see the accelerator:", bool(seen[0]["accelerator"].any()))
del loader

data = Dataset.from_dict({"n": list(range(10))}).map(double, num_proc=2)
print("map:", data["twice"][:], "calls:", os.path.getsize("mapped"))

with multiprocessing.get_context("fork").Pool(2) as pool:
    print("fork pool:", pool.map(square, range(4)))
code = "import torch; print('child:', torch.cuda.get_device_name() if torch.cuda.is_available() else 'no accelerator')"
subprocess.run([sys.executable, "-c", code], check=True)

found = []


def in_a_thread():
    moved = torch.ones(3, 4).cuda()
    found.append((moved.device.type, model(moved).shape, torch.zeros(1, device="cuda").is_cuda))


thread = threading.Thread(target=in_a_thread)
thread.start()
thread.join()
print("thread:", found)

losses = []


def evaluate():
    for _ in range(20):
        with torch.no_grad():
            losses.append(model(torch.ones(4, 4).cuda()).sum().item())


threads = [threading.Thread(target=evaluate) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("three threads at once:", len(losses), len(set(losses)))
