"""What a trial's forward leaves on the modules is there for its own backward, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.parallelizer.rng.policy import RandomPolicy
from moreh_ap.parallelizer.trial.split_check import check_split


class KeepsRandomState(nn.Module):
    """A part of a reversible layer, which runs in forward and once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.state: Tensor | None = None
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        if not again:
            self.state, self.seen["input"] = torch.get_rng_state(), x
            return self.net(x)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            assert torch.equal(self.seen["input"], x)
            return self.net(x)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: KeepsRandomState) -> Tensor:
        ctx.x, ctx.part = x.detach(), part
        with torch.no_grad():
            return x + part(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            y = ctx.part(x, again=True)
        y.backward(gradient)
        return gradient + x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(4, 4), KeepsRandomState()

    def forward(self, x: Tensor) -> Tensor:
        return Reversed.apply(self.first(x), self.part)


def test_a_backward_finds_what_its_own_forward_has_left_on_the_modules():
    torch.manual_seed(0)
    model = Reversible()
    stream = RandomPolicy(stream=torch.get_rng_state())
    call = Call(model, "split", torch.device("cpu"), axis=Axis(None, 1, 0), random=stream)
    found = check_split(call, (torch.randn(6, 4),), {}, 6)
    assert found.split, found.reason
    assert model.part.state is None and not model.part.seen
