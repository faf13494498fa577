"""A model's steps are timed on the workers, then in the script's own process, and it stays where they were faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moreh_ap.session import state_tensors
from moreh_ap.session.own_process.faster_place import FILE, FasterPlace
from moreh_ap.session.own_process.small_models import MAX_STEP_FLOPS
from moreh_ap.session.session import Session
from moreh_ap.session.state_tensors import OnWorkers

pytestmark = pytest.mark.rotating  # one more script each

ROWS, STEPS = 20000, 20


class Net(nn.Module):
    """Large enough for workers: a step of 500 MFLOP."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.body(x))


def train(
    device: str,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    places: list[bool] | None = None,
    steps: int = STEPS,
) -> list[float]:
    """Returns losses, sums of weights and of the optimizer's state; notes where the model is after each step."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = make(model)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(ROWS, 12), torch.randint(64, (ROWS,))
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if places is not None:
            places.append(isinstance(next(model.parameters())._cell.value, OnWorkers))
    state = [value for one in optimizer.state_dict()["state"].values() for value in one.values() if value is not None]
    return [*losses, *(float(value.double().abs().sum()) for value in [*model.state_dict().values(), *state])]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


@pytest.fixture
def session(accelerator: Callable[[str], Session], monkeypatch, tmp_path) -> Session:
    """A session that nobody has told how to lay models out, on a machine that remembers nothing."""
    assert 6 * sum(one.numel() for one in Net().parameters()) * ROWS > MAX_STEP_FLOPS["cpu"]
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    session = accelerator("replicate=2")
    session.options = replace(session.options, plan=None)
    return session


@pytest.fixture
def steps_on_workers_take(monkeypatch) -> Callable[[float], None]:
    """Has the workers' steps count as so many seconds."""

    def take(seconds: float) -> None:
        original = FasterPlace.measured_on_workers
        monkeypatch.setattr(
            FasterPlace, "measured_on_workers", lambda self, roots, by, _: original(self, roots, by, seconds)
        )

    return take


@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_model_whose_steps_are_faster_here_leaves_the_workers(session, steps_on_workers_take, make, capsys):
    steps_on_workers_take(1e6)
    places: list[bool] = []
    ours = train("cuda", make, places)
    moved = places.index(False)
    assert moved >= 6 and places == [True] * moved + [False] * (STEPS - moved)
    assert ours == pytest.approx(train("cpu", make), rel=1e-4, abs=1e-5)
    assert "Net runs in this process: a step takes " in capsys.readouterr().out


def test_the_next_run_begins_where_steps_were_faster(session, steps_on_workers_take, capsys):
    steps_on_workers_take(1e6)
    train("cuda", adamw)
    capsys.readouterr()
    places: list[bool] = []
    session.synchronize()
    sent = session.outbox._messages_sent
    ours = train("cuda", adamw, places, steps=4)
    assert not any(places) and session.outbox._messages_sent - sent <= 1  # the workers import the model's modules
    assert ours == pytest.approx(train("cpu", adamw, steps=4), rel=1e-6)
    assert "Net runs in this process: a step takes " in capsys.readouterr().out


def test_a_model_whose_steps_are_slower_here_returns_to_the_workers(session, steps_on_workers_take, capsys):
    steps_on_workers_take(1e-9)
    places: list[bool] = []
    ours = train("cuda", adamw, places)
    assert places[0] and places[-1] and not all(places)
    assert places.count(False) == 5
    assert ours == pytest.approx(train("cpu", adamw), rel=1e-4, abs=1e-5)
    shown = capsys.readouterr().out
    assert "Net runs on the workers: a step takes 1e-09 s on 2 workers, and " in shown
    assert shown.count("Selected") + shown.count("selected") <= 2  # the plan is not chosen anew
    places.clear()
    train("cuda", adamw, places)
    assert all(places)  # what was measured is not measured again


def test_a_script_that_gives_a_plan_is_not_tried_elsewhere(accelerator, steps_on_workers_take, monkeypatch, tmp_path):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    accelerator("replicate=2")
    steps_on_workers_take(1e6)
    places: list[bool] = []
    train("cuda", adamw, places)
    assert all(places) and not FILE.path.exists()


def test_large_values_come_in_several_messages(session, steps_on_workers_take, monkeypatch):
    monkeypatch.setattr(state_tensors, "_READ_BYTES", 4000)  # the head's weight alone has more
    steps_on_workers_take(1e6)
    places: list[bool] = []
    assert train("cuda", adamw, places) == pytest.approx(train("cpu", adamw), rel=1e-4, abs=1e-5)
    assert not places[-1]
