"""Global variables that a forward reads, or changes, and the script changes between calls."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moreh_ap.session.session import Session

SCALE, SEEN = 1.0, []
SETTINGS = argparse.Namespace(gain=1.0)


def scaled(x):
    return x * SCALE


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return scaled(self.layer(x)) * SETTINGS.gain


class Counting(Net):
    def forward(self, x):
        SEEN.append(len(x))
        return super().forward(x)


def train(device: str) -> list[float]:
    global SCALE
    torch.manual_seed(0)
    model, losses = Net().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        SCALE, SETTINGS.gain = 1.0 + step // 2, 1.0 / (1 + step)
        loss = model(torch.ones(8, 4, device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=2,micro_batches=2"])
def test_a_forward_reads_the_values_of_now(accelerator: Callable[[str], Session], plan: str):
    accelerator(plan)
    assert train("cuda") == pytest.approx(train("cpu"), rel=1e-5)


def test_the_script_is_warned_of_a_variable_that_a_forward_changes(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    with pytest.warns(UserWarning, match=r"Counting.forward \(line \d+ of .*\) changes the global variable SEEN"):
        Counting().cuda()(torch.ones(8, 4).cuda())
    assert SEEN == []
