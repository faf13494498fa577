"""Optimizers in the style of public ones, none of them of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Signs of an interpolation: each element by itself. After https://arxiv.org/abs/2302.06675."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                average, (beta1, beta2) = state["exp_avg"], group["betas"]
                update = average * beta1 + p.grad * (1 - beta1)
                p.add_(torch.tanh(10 * update), alpha=-group["lr"])  # smooth, so that rounding changes no sign
                average.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Returns a matrix near the closest orthogonal one, by Newton-Schulz iterations."""
    x = matrix.mT if matrix.size(0) > matrix.size(1) else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if matrix.size(0) > matrix.size(1) else x


class Muon(Optimizer):
    """Momentum, made orthogonal where it is a matrix: all of it is needed."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"], state["step"] = torch.zeros_like(p.grad), 0
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(state["momentum"], group["momentum"])
                p.add_(orthogonal(update) if update.ndim == 2 else update, alpha=-group["lr"])


class CountingMuon(Muon):
    """The same with steps that are counted, and with the process that took the last one of a parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None and p.grad.abs().max() > 1e6:
                    raise FloatingPointError("a gradient is too large")
                if p.grad is not None:
                    p.mul_(1 - 0.1 / group["step"])
        super().step()
        for p, entries in self.state.items():
            if p.grad is not None:
                entries["process"] = os.getpid()


class Rows(Optimizer):
    """An average of squares for each row and column, and a ratio of norms, as Adafactor and LAMB have them."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["rows"] = p.new_zeros(p.shape[0])
                    state["columns"] = p.new_zeros(p.shape[-1])
                squares = p.grad.square().view(p.shape[0], -1) + 1e-6
                state["rows"].mul_(0.9).add_(squares.mean(1), alpha=0.1)
                if p.ndim == 2:
                    state["columns"].mul_(0.9).add_(squares.mean(0), alpha=0.1)
                    scale = torch.outer(state["rows"], state["columns"]) / state["rows"].mean()
                else:
                    scale = state["rows"].view(-1, *[1] * (p.ndim - 1))
                update = p.grad / scale.sqrt()
                update.div_(max(1.0, update.norm().item() / update.numel() ** 0.5))
                p.sub_(update * group["lr"] * (p.norm() + 1e-3))


class Columns(Optimizer):
    """Products of columns, as Shampoo has them: of a matrix of 2n x n they have the shape of its half."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, matrix = self.state[p], p.grad.view(-1, p.shape[-1])
                if not state:
                    state["momentum"], state["columns"] = torch.zeros_like(p), p.new_ones(p.shape[-1]).diag()
                state["columns"].add_(matrix.mT @ matrix)
                state["momentum"].mul_(0.9).add_((matrix @ state["columns"].inverse()).view_as(p))
                p.sub_(state["momentum"], alpha=group["lr"])


class Lamb(Optimizer):
    """A ratio of norms for each parameter, and steps that are counted in the groups, as in many libraries."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.999)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                size = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt().add_(1e-3)
                update = state["exp_avg"] / (1 - beta1 ** group["step"]) / size
                p.sub_(update * (p.norm() / update.norm().clamp(min=1e-3)).clamp(max=10), alpha=group["lr"])
        return loss


class DecayedAdam(torch.optim.Adam):
    """Adam of torch with something before its step, and an attribute of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, decay: float = 0.02):
        super().__init__(params, lr=lr)
        self.decay = decay

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - self.decay)
        return super().step(closure)


class CountingAdam(DecayedAdam):
    """The same with a count, which has to rise in the script: steps stay there, but for the one of Adam."""

    num_steps = 0

    def step(self, closure: Callable[[], Tensor] | None = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


class HalvedSGD(torch.optim.SGD):
    """SGD of torch with something in the middle of its step."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, lr=lr, momentum=0.9)

    def _init_group(self, group: Any, params: Any, grads: list[Tensor], *others: Any) -> Any:
        found = super()._init_group(group, params, grads, *others)
        for one in grads:
            one.mul_(0.5)
        return found


class Normed(Optimizer):
    """Divides by the norm of all gradients: no parameter can be stepped alone."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm() + 1e-6
        for p in used:
            p.sub_(p.grad / norm, alpha=self.param_groups[0]["lr"])


ON_WORKERS = (Lion, Muon, Rows, Columns, Lamb, DecayedAdam, HalvedSGD)
IN_SCRIPT = (CountingAdam, Normed)
