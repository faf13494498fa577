"""Layers, buffers and hooks that a forward adds to its model: the script finds and trains them as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rotating import rotating_from
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

from moreh_ap.session.session import Session

PLANS = rotating_from(1, ["replicate=2", "shard=2", "replicate=1"])


class Projecting(nn.Module):
    """As in BYOL: the projector is made in the first forward, for what a hook has seen of a layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 8))
        self.projector: nn.Module | None = None
        self.is_hooked = False

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.hidden = output

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_hooked:
            self.net[1].register_forward_hook(self._keep)
            self.is_hooked = True
        self.net(x)
        if self.projector is None:
            self.projector = nn.Sequential(nn.Linear(self.hidden.shape[1], 16), nn.BatchNorm1d(16), nn.ReLU()).to(x)
            self.projector.append(nn.Linear(16, 4).to(x.device))
        return self.projector(self.hidden).pow(2).mean()


class Centred(nn.Module):
    """Its first forward decides what later ones subtract."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("centre", None)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.calls += 1
        if self.centre is None:
            self.centre = y.detach().mean(0)
            self.register_buffer("scale", y.detach().std(0))
            self.gain = nn.Parameter(torch.full((4,), 0.5, device=x.device))
        return ((y - self.centre) / self.scale * self.gain).abs().sum(1)


def train(model: nn.Module, device: str) -> object:
    model = model.to(device)
    optimizer, trace = None, []
    for step in range(5):
        x = torch.randn(6, 6) + step
        loss = model(x.to(device)).mean()
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.append(loss)
    return trace, model.state_dict(), dict(model.named_parameters()), getattr(model, "calls", 0)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", rotating_from(1, [Projecting, Centred]))
def test_what_the_first_forward_adds_is_trained(accelerator: Callable[[str], Session], plan, make):
    accelerator(plan)
    assert_same(*on_both(lambda device: train(make(), device)), rtol=1e-4, atol=1e-5)


def test_a_later_forward_adds_a_layer(accelerator: Callable[[str], Session]):
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layers = nn.Linear(6, 6), nn.ModuleList()

        def forward(self, x: Tensor, grow: bool = False) -> Tensor:
            if grow:
                self.layers.append(nn.Linear(6, 6).to(x.device))
            x = self.first(x)
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    def script(device: str) -> object:
        model, trace = Growing().to(device), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            num_layers = len(model.layers)
            loss = model(torch.randn(4, 6).to(device), grow=step in (2, 4)).pow(2).mean()
            if len(model.layers) > num_layers:
                optimizer.add_param_group({"params": model.layers[-1].parameters()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss)
        return trace, model.state_dict()

    accelerator("replicate=2")
    assert_same(*on_both(script))


def test_sparse_gradients_that_were_computed_here_reach_the_workers(accelerator: Callable[[str], Session]):
    """The first call is the script's, so that its gradients are sparse."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "head"):
                self.head = nn.Linear(4, 2).to(x.device)
            return self.head(self.bag(x)).pow(2).sum(1)

    def script(device: str) -> object:
        model, trace = Bag().to(device), []
        for _ in range(3):
            loss = model(torch.randint(9, (4, 3)).to(device)).mean()
            loss.backward()  # gradients of all steps add up
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            trace.append(loss)
        return trace, model.state_dict()

    accelerator("replicate=2")
    assert_same(*on_both(script))
