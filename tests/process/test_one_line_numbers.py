"""Numbers and weights among the arguments of a forward: coefficients that change, biases, branches that follow them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

from moreh_ap.session.session import Session

VALUES = (0.0, 0.0, 0.5, 1.5, 0.0)
FORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {
    "a term": lambda model, y, c: y.square().mean() + c * model.layer.weight.norm(),
    "a term of a sum": lambda model, y, c: y.square().sum() + c * model.layer.weight.norm(),
    "a sum over rows": lambda model, y, c: (y + c * y.sum(0)).square().mean(),
    "a second gate": lambda model, y, c: (y + model.gate * c * y.sum(0)).square().mean(),
    "a branch": lambda model, y, c: (y * y.sum(0) if c > 1 else y).square().mean(),
    "a read number": lambda model, y, c: y.square().sum() + (model.layer.weight.norm() if c.item() else 0),
    "a number of the model": lambda model, y, c: (y * y.sum(0) if c > model.warm_up else y).square().mean(),
    "a choice": lambda model, y, c: torch.where(c > 1, y * y.sum(0), y).square().mean(),
    "a kink": lambda model, y, c: y.square().mean() + (c - 1).relu() * model.layer.weight.norm(),
}


class Weighted(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer, self.gate, self.form = nn.Linear(6, 3), nn.Parameter(torch.zeros(3)), form
        self.register_buffer("warm_up", torch.tensor(1.0))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return FORMS[self.form](self, self.layer(x), c)


@pytest.mark.parametrize("form", rotating_from(1, FORMS))
def test_a_coefficient_that_is_zero_in_the_first_call(accelerator: Callable[[str], Session], form):
    def script(device: str) -> object:
        model, trace = Weighted(form).to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        x = torch.randn(8, 6).to(device)
        for value in VALUES:
            optimizer.zero_grad()
            loss = model(x, torch.tensor(value).to(device))
            loss.backward()
            optimizer.step()
            trace += [loss, model.layer.weight.grad.clone()]
        return trace, model.state_dict()

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=2e-5)


class Weighing(nn.Module):
    """The coefficients of its terms are one argument; the second one is warmed up, the third one switches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        y = self.layer(x)
        other = y.sum(0).square().mean() if weights[2] > 0.5 else y.mean()
        return (torch.stack([y.square().mean(), self.layer.weight.norm(), other]) * weights).sum()


def test_coefficients_in_one_tensor(accelerator: Callable[[str], Session]):
    def script(device: str) -> object:
        model, trace = Weighing().to(device), []
        x = torch.randn(8, 6).to(device)
        for value in VALUES:
            model.zero_grad()
            loss = model(x, torch.tensor([1.0, value, value / 2]).to(device))
            loss.backward()
            trace += [loss, model.layer.weight.grad.clone()]
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=2e-5)


class Functional(nn.Module):
    """As in meta-learning: its weights are arguments, of as many outputs as the batch has rows."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((8, 6), (8,), (3, 8), (3,))
        self.vars = nn.ParameterList([torch.randn(*size) / 3 if len(size) > 1 else torch.zeros(size) for size in sizes])

    def forward(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        return F.linear(F.linear(x, weights[0], weights[1]).relu(), *weights[2:])


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2"]))
def test_weights_among_the_arguments(accelerator: Callable[[str], Session], monkeypatch, plan):
    def script(device: str) -> object:
        model, found = Functional().to(device), []
        x, y = torch.randn(8, 6).to(device), torch.randn(8, 3).to(device)
        for _ in range(2):
            own = list(model.parameters())
            fast = [parameter - 0.1 for parameter in own]
            free = [parameter.detach().add(0.1).requires_grad_() for parameter in own]
            for weights in (own, fast, free):
                model.zero_grad()
                loss = F.mse_loss(model(x, weights), y)
                loss.backward()
                found += [loss, *(one.grad for one in (*own, *free))]
        return found

    monkeypatch.setenv("MOREH_STRICT", "1")
    accelerator(plan)
    assert_same(*on_both(script))


class Gate(nn.Module):
    """Nothing comes through while it is zero."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.trained = kind, nn.Parameter(torch.zeros(()))
        self.register_buffer("set_by_the_script", torch.zeros(()))

    def forward(self, y: Tensor) -> Tensor:
        gate = self.set_by_the_script if self.kind == "buffer" else self.trained.square()
        return y + gate * (y - y.mean(0))


class Gated(nn.Module):
    def __init__(self, kind: str, meets: bool) -> None:
        super().__init__()
        self.layer, self.gate, self.meets = nn.Linear(6, 3), Gate(kind), meets

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(self.layer(x))
        return (y @ y.t()).softmax(1) if self.meets else y


@pytest.mark.parametrize("meets", rotating_from(1, [False, True]))
@pytest.mark.parametrize("kind", rotating_from(1, ["buffer", "square"]))
def test_a_gate_that_is_zero_in_the_first_calls(accelerator: Callable[[str], Session], kind, meets):
    def script(device: str) -> object:
        model, trace = Gated(kind, meets).to(device), []
        x = torch.randn(8, 6).to(device)
        for step in range(3):
            model.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            trace += [loss, model.layer.weight.grad.clone()]
            with torch.no_grad():
                for gate in (model.gate.trained, model.gate.set_by_the_script):
                    gate.add_(step)
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


DECISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "any": lambda x, y: y * 2 if (x > 5).any() else y,
    "all": lambda x, y: y if (x < 5).all() else y * 2,
    "largest": lambda x, y: y * 2 if x.max() > 5 else y,
    "largest in Python": lambda x, y: y / 3 if x.abs().max().item() > 5 else y,
    "scale": lambda x, y: y / x.amax().clamp(min=5),
    "choice": lambda x, y: y * torch.where(x.max() > 5, 2.0, 1.0),
    "found": lambda x, y: y + 1 if (x[:, 0] > 5).nonzero().numel() else y,
}


class Deciding(nn.Module):
    """One row may decide what becomes of all of them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        return DECISIONS[self.kind](x, self.layer(x))


class Checking(nn.Module):
    """What it asks of all rows changes nothing: a check, and a mask that is left out where it hides nothing."""

    def __init__(self, normalises: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(3) if normalises else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if torch.isnan(x).any() or x.abs().max() > 1e3:
            raise ValueError("unusable input")
        y = self.norm(self.layer(x))
        return y if mask.all() else y.masked_fill(~mask, 0.0)


@pytest.mark.parametrize("normalises", rotating_from(1, [False, True]))
def test_what_is_asked_of_all_rows_and_decides_nothing_leaves_the_batch_split(
    accelerator: Callable[[str], Session], normalises, monkeypatch, capsys
):
    def script(device: str) -> object:
        model, x = Checking(normalises).to(device), torch.randn(8, 6).to(device)
        mask = torch.ones(8, 1, dtype=torch.bool)
        loss = model(x, mask.to(device)).square().sum()
        mask[5] = False
        loss = loss + model(x, mask.to(device)).square().sum()
        loss.backward()
        return loss, model.layer.weight.grad

    monkeypatch.setenv("MOREH_STRICT", "1")
    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert "whole batch" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", rotating_from(1, DECISIONS))
def test_a_row_of_a_later_batch_decides_for_those_of_other_workers(accelerator: Callable[[str], Session], kind):
    def script(device: str) -> object:
        model, trace = Deciding(kind).to(device), []
        x = torch.randn(8, 6)
        large = x.clone()
        large[6, 0] = 9.0
        for rows in (x, x, large, large, x):
            model.zero_grad()
            loss = model(rows.to(device)).square().sum()
            loss.backward()
            trace += [loss, model.layer.weight.grad.clone()]
        return trace

    accelerator("replicate=2")
    assert_same(*on_both(script), rtol=2e-5)
