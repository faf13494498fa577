"""Trains a model on few rows, with as many devices as the accelerator's model has, and prints its losses as JSON.

    python fewer_devices.py HOW [larger]

HOW is "one" (and no accelerator), "plain", "given" (the script gives the number of devices), or "memory" (workers run
out if they are fewer than the devices). With "larger" a second model with many rows comes after the forward of the
first one.
"""

import json
import os
import sys

import torch
from torch import nn

HOW = sys.argv[1]
WIDTH, LENGTH, FEW, MANY = 256, 64, 2, 128


def runs_out(x: torch.Tensor) -> bool:
    """Whether this is one of fewer workers than there are devices, in a training step."""
    few = os.environ.get("MOREH_AP_WORKER") and os.environ["WORLD_SIZE"] != os.environ["ALL_DEVICES"]
    return bool(few) and type(x) is torch.Tensor and torch.is_grad_enabled()


class Model(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))

    def forward(self, x):
        if HOW == "memory" and runs_out(x):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def main() -> None:
    if HOW != "one":
        torch.moreh.option.enable_advanced_parallelization(
            pipeline_parallel=False,  # which keeps even a small model on the workers
            mixed_precision=False,
            devices=int(os.environ["ALL_DEVICES"]) if HOW == "given" else None,
        )
    device = "cpu" if HOW == "one" else "cuda"
    torch.manual_seed(0)
    model, second = Model(28).to(device), Model(4).to(device)
    has_second = "larger" in sys.argv
    models = [model, second] if has_second else [model]
    optimizer = torch.optim.AdamW([p for one in models for p in one.parameters()], lr=1e-3)
    losses = []
    for _ in range(8):
        x, y = torch.randn(FEW, LENGTH, WIDTH).to(device), torch.randn(FEW, LENGTH, WIDTH).to(device)
        loss = ((model(x) - y) ** 2).mean()
        if has_second:
            loss = loss + (second(torch.randn(MANY, LENGTH, WIDTH).to(device)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print("devices:", torch.cuda.device_count())
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
