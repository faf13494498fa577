"""Quantization-aware training with torchao: `prepare`, a loop, `convert`; and low-bit training of linear layers.

With --ap it has the one line; prints losses.
"""

import copy
import sys

import torch

if "--ap" in sys.argv:
    torch.moreh.option.enable_advanced_parallelization()

from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
from torchao.quantization.granularity import PerGroup
from torchao.quantization.qat import QATConfig


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
    base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, QATConfig(base, step="prepare"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # Adam makes steps of rounding, and 4 bits see them
    for _ in range(5):
        classes = torch.randint(0, 8, (16,))
        rows = torch.randn(16, 64) + classes[:, None] / 4
        loss = nn.functional.cross_entropy(model(rows.to(device)), classes.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    trained = copy.deepcopy(model).cpu()
    print(f"output {trained(torch.ones(2, 64)).sum().item():.6f}")


if __name__ == "__main__":
    main()
