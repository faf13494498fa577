"""Small models run in the script's own process: with one device's losses, and on the workers once a call is large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.body(x))


def train(device: str, sizes: list[int], between: Callable[[nn.Module], object] = lambda model: None) -> list[float]:
    """Returns losses of steps with batches of these sizes, of the evaluation at the end, and of the weights."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    losses = []
    for rows in sizes:
        x, y = torch.randn(rows, 12), torch.randint(3, (rows,))
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        between(model)
    model.eval()
    with torch.no_grad():
        losses.append(model(torch.ones(2, 12, device=device)).sum().item())
    return [*losses, *(float(value.double().sum()) for value in model.state_dict().values())]


@pytest.fixture
def session(accelerator: Callable[[str], Session]) -> Session:
    """A session that nobody has told how to lay models out."""
    session = accelerator("replicate=2")
    session.options = replace(session.options, plan=None)
    return session


def is_on_workers(model: nn.Module) -> bool:
    return isinstance(next(model.parameters())._cell.value, OnWorkers)


def test_no_step_of_a_small_model_tells_the_workers_anything(session: Session, capsys):
    places = []
    session.synchronize()
    sent = session.outbox._messages_sent
    ours = train("cuda", [16] * 6, lambda model: places.append(is_on_workers(model)))
    announced = 1  # the workers import the model's modules, in case it goes to them
    assert session.outbox._messages_sent - sent <= announced and not any(places)
    assert "Net runs in this process" in capsys.readouterr().out
    assert ours == pytest.approx(train("cpu", [16] * 6), rel=1e-6)


def test_a_large_call_takes_the_model_with_its_optimizer_to_the_workers(session: Session):
    sizes, places = [16, 16, 200000, 16, 16], []
    ours = train("cuda", sizes, lambda model: places.append(is_on_workers(model)))
    assert places == [False, False, True, True, True]
    assert ours == pytest.approx(train("cpu", sizes), rel=1e-4, abs=1e-5)
