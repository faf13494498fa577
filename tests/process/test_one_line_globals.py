"""Global variables that a forward reads, or changes, and the script changes between calls."""

from __future__ import annotations

import argparse
import collections
import os
import sys
from collections.abc import Callable

import pytest
import torch
from rotating import rotating_from
from torch import nn

from moreh_ap.session.session import Session

SCALE, SEEN = 1.0, []
SETTINGS = argparse.Namespace(gain=1.0)
MASK, RECENT, LONG = torch.ones(3), collections.deque([1.0], maxlen=2), [1.0] * 200


class Config:
    gain = 1.0


def scaled(x):
    return x * SCALE


class Net(nn.Module):
    shift = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return scaled(self.layer(x)) * SETTINGS.gain + self.shift


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
        SCALE, SETTINGS.gain, Net.shift = 1.0 + step // 2, 1.0 / (1 + step), 0.1 * step
        loss = model(torch.ones(8, 4, device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2", "replicate=2,micro_batches=2"]))
def test_a_forward_reads_the_values_of_now(accelerator: Callable[[str], Session], plan: str):
    accelerator(plan)
    assert train("cuda") == pytest.approx(train("cpu"), rel=1e-5)


def test_the_script_is_warned_of_a_variable_that_a_forward_changes(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    with pytest.warns(UserWarning, match=r"Counting.forward \(line \d+ of .*\) changes the global variable SEEN"):
        Counting().cuda()(torch.ones(8, 4).cuda())
    assert SEEN == []


class Scaled(nn.Module):
    """Its parameter is made on the accelerator, as Keras makes those of its layers: no move is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device="cuda"))

    def forward(self, x):
        return x * self.weight * float(os.environ["MODEL_SCALE"])


def test_workers_have_the_environment_that_a_model_was_made_in(accelerator: Callable[[str], Session], monkeypatch):
    accelerator("replicate=2")
    x = torch.ones(8, 4, device="cuda")
    Net().cuda()(x).sum().backward()  # the workers have begun with another model
    monkeypatch.setenv("MODEL_SCALE", "3")
    assert Scaled()(x).sum().item() == 3 * 8 * 4


class Wide(Net):
    def forward(self, x):
        return self.layer(x) * MASK.to(x.device) * RECENT[-1] * LONG[150] * Config.gain


class Scaling:
    """A hook that computes with what it keeps, and counts."""

    def __init__(self) -> None:
        self.gain, self.num_calls = 1.0, 0

    def __call__(self, module, args, output):
        self.num_calls += 1
        return output * self.gain + self.num_calls


def train_wide(device: str) -> list[float]:
    global MASK
    MASK, offset = torch.ones(3, device=device), 0.0
    Config.gain = 1.0

    class Enclosing(Wide):
        def forward(self, x):
            return super().forward(x) + offset

    torch.manual_seed(0)
    model, losses, scaling = Enclosing().to(device), [], Scaling()
    model.layer.register_forward_hook(scaling)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        loss = model(torch.ones(8, 4, device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        MASK[step % 3] = 1.5 + step
        offset, Config.gain, LONG[150] = 0.1 * step, 1.0 / (1 + step), 1.0 - 0.1 * step
        RECENT.append(1.0 + step)
        scaling.gain = 1.0 + 0.1 * step
    LONG[150], RECENT[-1] = 1.0, 1.0
    return losses


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2"]))
def test_tensors_long_lists_objects_and_what_hooks_keep_are_those_of_now(
    accelerator: Callable[[str], Session], plan: str
):
    accelerator(plan)
    assert train_wide("cuda") == pytest.approx(train_wide("cpu"), rel=1e-5)


OUTSIDE = nn.Linear(4, 3)


class Calling(Net):
    def forward(self, x):
        return self.layer(x) + OUTSIDE(x.to(OUTSIDE.weight.device)).detach().to(x.device)


def train_calling(device: str) -> list[float]:
    torch.manual_seed(0)
    torch.nn.init.normal_(OUTSIDE.weight)
    model, losses = Calling().to(device), []
    for step in range(3):
        losses.append(model(torch.ones(8, 4, device=device)).pow(2).mean().item())
        with torch.no_grad():
            OUTSIDE.weight.fill_(float(step))
    return losses


def test_a_module_outside_of_the_model_is_that_of_now(accelerator: Callable[[str], Session]):
    accelerator("replicate=2")
    assert train_calling("cuda") == pytest.approx(train_calling("cpu"), rel=1e-5)


def test_the_script_is_warned_of_a_module_outside_on_the_accelerator_that_changes(
    accelerator: Callable[[str], Session], monkeypatch: pytest.MonkeyPatch
):
    accelerator("replicate=2")
    monkeypatch.setattr(sys.modules[__name__], "OUTSIDE", nn.Linear(4, 3).cuda())
    model = Calling().cuda()
    model(torch.ones(8, 4).cuda()).sum().item()
    with torch.no_grad():
        OUTSIDE.weight.zero_()
    with pytest.warns(UserWarning, match="The module OUTSIDE, outside of the model, has changed"):
        model(torch.ones(8, 4).cuda()).sum().item()
