"""Ctrl-C at any moment of a training step: the next step works, in the script's own process and on workers."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Has an alarm be handled as Ctrl-C is."""
    before = signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGINT))
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Loop:
    """A script that trains a small model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        loss = self.model(torch.randn(8, 4).cuda()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


@pytest.mark.parametrize("place", ["here", "on workers"])
def test_the_step_after_an_interrupt_works(accelerator: Callable[[str], Session], place: str, request):
    session = accelerator("replicate=2")
    request.getfixturevalue("interrupts")
    if place == "here":
        session.options = replace(session.options, plan=None)
    loop = Loop()
    for _ in range(5):
        loop.step()
    assert isinstance(next(loop.model.parameters())._cell.value, OnWorkers) is (place == "on workers")
    began = time.monotonic()
    for _ in range(20):
        loop.step()
    step_s = (time.monotonic() - began) / 20
    chance, num_interrupted, until_s = random.Random(1), 0, time.monotonic() + 10
    while time.monotonic() < until_s:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + chance.random() * 2 * step_s)
            while True:
                loop.step()
        num_interrupted += 1
        assert loop.step() >= 0, f"after {num_interrupted} interrupts"
    assert num_interrupted > 20
