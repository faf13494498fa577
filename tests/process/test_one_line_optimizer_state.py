"""Scripts that change `optimizer.state` between steps: moments that are dropped, replaced or added."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_one_line_training import assert_same, on_both
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from moreh_ap.protocol.messages.optimizers import LoadOptimizer, StepOptimizer


def _drop(optimizer: Optimizer, parameters: list[Any]) -> None:
    optimizer.state.clear()


def _replace(optimizer: Optimizer, parameters: list[Any]) -> None:
    optimizer.state = defaultdict(dict)


def _take_out(optimizer: Optimizer, parameters: list[Any]) -> None:
    optimizer.state.pop(parameters[0])
    del optimizer.state[parameters[1]]
    optimizer.state[parameters[2]] = {}


def _replace_one(optimizer: Optimizer, parameters: list[Any]) -> None:
    optimizer.state[parameters[0]]["exp_avg"] = torch.full_like(parameters[0], 0.01)
    optimizer.state[parameters[1]]["exp_avg_sq"].mul_(2.0)


def _count_anew(optimizer: Optimizer, parameters: list[Any]) -> None:
    for parameter in parameters:
        optimizer.state[parameter]["step"].fill_(1.0)
    optimizer.state[parameters[0]]["step"] = torch.tensor(5.0)


def _add(optimizer: Optimizer, parameters: list[Any]) -> None:
    for parameter in parameters:
        optimizer.state[parameter].setdefault("slow", parameter.detach().clone())


def _forget_momentum(optimizer: Optimizer, parameters: list[Any]) -> None:
    optimizer.state[parameters[0]]["momentum_buffer"] = None


def _train(device: str, make: Callable[[Any], Optimizer], change: Callable[[Optimizer, list[Any]], None]) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    optimizer, parameters, losses = make(model.parameters()), list(model.parameters()), []
    for step in range(5):
        rows, labels = torch.randn(8, 6).to(device), torch.randint(4, (8,)).to(device)
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step in (0, 2):
            change(optimizer, parameters)
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def _adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-2)


def _sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1, momentum=0.9)


_CHANGES = [
    (_adamw, _drop),
    (_adamw, _replace),
    (_adamw, _take_out),
    (_adamw, _replace_one),
    (_adamw, _count_anew),
    (_adamw, _add),
    (_sgd, _drop),
    (_sgd, _forget_momentum),
]


@pytest.mark.parametrize("plan", ["shard=2", pytest.param("replicate=2", marks=pytest.mark.rotating)])
def test_state_that_the_script_changes_is_what_the_next_step_begins_with(accelerator, plan):
    accelerator(plan)
    for make, change in _CHANGES:
        assert_same(*on_both(lambda device, make=make, change=change: _train(device, make, change)))


def test_state_that_is_only_read_is_not_sent_back(accelerator):
    """What workers have stays there, too, where the script replaces an entry beside it."""
    session = accelerator("shard=2")
    sent: list[Any] = []
    session.outbox.on_sent = lambda commands, posted: sent.extend(commands)

    def look(optimizer: Optimizer, parameters: list[Any]) -> None:
        assert len(optimizer.state) == len(parameters)
        assert optimizer.state[parameters[0]]["exp_avg"].shape == parameters[0].shape

    on_both(lambda device: _train(device, _adamw, look))
    assert len([one for one in sent if isinstance(one, StepOptimizer)]) == 5
    assert [one.state for one in sent if isinstance(one, LoadOptimizer)] == [{}]  # of the optimizer that was made
    sent.clear()
    on_both(lambda device: _train(device, _adamw, _replace_one))
    loaded = [one for one in sent if isinstance(one, LoadOptimizer)][1]
    assert "exp_avg" in loaded.state[0] and loaded.kept[0] == ("exp_avg_sq",)
    assert loaded.kept[1] == ("exp_avg", "exp_avg_sq")
