"""What each process does in the tests of large layers outside of blocks, and the models for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from parallelizer_jobs import Runner
from parallelizer_models import ADAMW
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moreh_ap.parallelizer.data import outer_layers
from moreh_ap.plan import Plan

LENGTH, VOCABULARY, WIDTH, ROWS = 6, 61, 16, 8


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, tokens, width] -> the same"""
        return hidden + self.up(self.norm(hidden)).tanh()


class Model(nn.Module):
    """A small language model, whose forward goes about its head as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind == "tied":
            self.head.weight = self.embedding.weight
        if kind == "frozen":
            self.embedding.weight.requires_grad_(False)

    def forward(self, ids: Tensor, later: bool) -> tuple[Tensor, Tensor]:
        """[rows, tokens] -> loss, [rows, tokens, width]"""
        penalty: Tensor | float = 0.0
        kind = self.kind if later or not self.kind.startswith("later ") else "called"
        kind = kind.removeprefix("later ")
        if kind == "penalty before":
            penalty = self.head.weight.pow(2).mean()
        hidden = self.embedding(ids)
        if kind == "embedding twice":
            hidden = hidden + self.embedding(ids.flip(-1))
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.norm(hidden)
        if kind == "not called":
            return hidden.pow(2).mean(), hidden
        if kind == "read alone":
            logits = F.linear(hidden, self.head.weight)
        elif kind == "called twice":
            logits = self.head(hidden) + self.head(hidden.tanh())
        else:
            logits = self.head(hidden)
        if kind == "penalty after":
            penalty = self.head.weight.pow(2).mean()
        if kind == "penalty on all":
            penalty = sum(p.pow(2).mean() for layer in (self.embedding, self.head) for p in layer.parameters())
        if kind == "read between":
            logits = logits + F.linear(hidden.tanh(), self.head.weight) + self.head(hidden.cos())
        if kind == "decoded":
            hidden = F.embedding(ids, self.embedding.weight)
            logits = logits + self.head(hidden)
        if kind == "in place":
            logits.mul_(0.5)
        targets = ids.roll(-1, 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + penalty, hidden


def batch(step: int) -> dict[str, Any]:
    """Returns the rows of a step."""
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"ids": ids, "later": step >= 2}


def make(kind: str) -> nn.Module:
    """Returns the same model at every call."""
    torch.manual_seed(1)
    return Model(kind)


def train_alone(model: nn.Module, steps: int) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns losses, first gradients and final weights of plain PyTorch."""
    losses, gradients = [], {}
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(steps):
        loss, _ = model(**batch(step))
        loss.backward()
        if not step:
            gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}


def alone(kind: str, steps: int) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns losses, first gradients and final weights of plain PyTorch."""
    return train_alone(make(kind), steps)


def train(rank: int, world: int, kind: str, plan: str, steps: int, least: int) -> Any:
    """Returns losses, first gradients, final weights, the units, which of them joined, and losses of an evaluation."""
    joined = []
    join = outer_layers._Unit._join

    def note(unit: Any) -> None:
        joined.append(next(name for name, module in runner.model.named_modules() if module is unit.layer))
        join(unit)

    with (
        mock.patch.object(outer_layers, "LEAST_PARAMETERS", least),
        mock.patch.object(outer_layers._Unit, "_join", note),
    ):
        runner = Runner(make(kind), Plan.parse(plan))
        managed = {name: module for name, module in runner.model.named_modules() if isinstance(module, FSDPModule)}
        units = [name for name, module in managed.items() if not isinstance(module, (Block, Model))]
        optimizer = torch.optim.AdamW(runner.model.parameters(), **ADAMW)
        losses, evaluated, gradients = [], [], {}
        for step in range(steps):
            if step == 2:
                runner.verdict = None  # another kind of call has a check of its own
            forward = runner.call(batch(step))
            forward.backward(runner.loss_gradient(forward))
            losses.append(runner.value(forward).item())
            if not step:
                gradients = runner.gradients()
            optimizer.step()
            optimizer.zero_grad()
            evaluated.append(runner.value(runner.call(batch(step), grad=False)).item())
        forwards = [runner.call(batch(step)) for step in (steps, steps + 1)]  # two before their backwards
        for forward in forwards:
            forward.backward(runner.loss_gradient(forward))
        return losses, gradients, runner.weights(), units, joined, evaluated, runner.gradients()
