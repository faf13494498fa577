"""What each process does in the tests of forwards that use parts of blocks themselves, and the models for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from outer_layers_jobs import VOCABULARY, WIDTH, batch, train_alone
from parallelizer_jobs import Runner
from parallelizer_models import ADAMW
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from moreh_ap.parallelizer.data.fsdp import fsdp_modules, param_groups
from moreh_ap.plan import Plan

NUM_BLOCKS = 3


class FeedForward(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, tokens, width] -> the same"""
        return self.down(self.up(hidden).tanh())


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.ff = FeedForward()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, tokens, width] -> the same"""
        return parts(self, hidden)


def parts(block: Block, hidden: Tensor) -> Tensor:
    """What a block computes, from outside of its forward: [rows, tokens, width] -> the same"""
    return hidden + block.scale * block.ff(block.norm(hidden))


class Blocks(nn.Module):
    """A module whose forward uses parts of blocks that are another's."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = [blocks]

    def forward(self, hidden: Tensor) -> Tensor:
        """[rows, tokens, width] -> the same"""
        for block in self.blocks[0]:
            hidden = parts(block, hidden)
        return hidden


class Model(nn.Module):
    """A small language model, whose forward goes about its blocks as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.other = Blocks(self.blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if kind == "frozen around":
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)
        if kind == "nothing around":
            del self.embedding, self.head
            self.register_buffer("table", torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids: Tensor, later: bool) -> tuple[Tensor, Tensor]:
        """[rows, tokens] -> loss, [rows, tokens, width]"""
        kind = self.kind
        if kind == "evaluation":
            kind = "called" if torch.is_grad_enabled() else "parts"
        if kind.startswith("later"):
            kind = kind.removeprefix("later ") if later else "called"
        table = self.table if kind == "nothing around" else None
        hidden = self.embedding(ids) if table is None else F.embedding(ids, table)
        if kind == "another's":
            hidden = self.other(hidden)
        for number, block in enumerate(self.blocks):
            hidden = self._through(kind, number, block, hidden)
        if kind == "weight":
            hidden = F.linear(F.linear(hidden, self.blocks[0].ff.up.weight), self.blocks[0].ff.down.weight)
        if kind == "penalty":
            hidden = hidden + sum(one.pow(2).mean() for one in self.blocks[1].parameters())
        logits = self.head(hidden) if table is None else F.linear(hidden, table)
        targets = ids.roll(-1, 1)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), hidden

    def _through(self, kind: str, number: int, block: Block, hidden: Tensor) -> Tensor:
        if kind == "forward":
            return block.forward(hidden)
        if kind == "called and opened":
            return block(parts(block, hidden))
        if kind == "checkpoint":
            return checkpoint(parts, block, hidden, use_reentrant=False)
        if kind == "checkpoint reentrant":
            return checkpoint(parts, block, hidden, use_reentrant=True)
        if kind in ("parts", "frozen around", "nothing around") or (kind == "one" and number == 1):
            return parts(block, hidden)
        return block(hidden)


def make(kind: str) -> nn.Module:
    """Returns the same model at every call."""
    torch.manual_seed(1)
    return Model(kind)


def alone(kind: str, steps: int) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """Returns losses, first gradients and final weights of plain PyTorch."""
    return train_alone(make(kind), steps)


def train(rank: int, world: int, kind: str, plan: str, steps: int) -> Any:
    """Returns losses, first gradients, final weights, the blocks that have joined the rest of the model, bytes that
    stayed gathered after each step, gradients of two forwards, between which another kind of call is tried, and whether
    the batch was split."""
    runner = Runner(make(kind), Plan.parse(plan))
    optimizer = torch.optim.AdamW(runner.model.parameters(), **ADAMW)
    losses, gradients, gathered = [], {}, []
    for step in range(steps):
        if step == 2:
            runner.verdict = None  # another kind of call has a check of its own
        forward = runner.call(batch(step))
        forward.backward(runner.loss_gradient(forward))
        gathered.append(gathered_bytes(runner.model))
        losses.append(runner.value(forward).item())
        if not step:
            gradients = runner.gradients()
        optimizer.step()
        optimizer.zero_grad()
    verdict = runner.verdict
    forwards = [runner.call(batch(steps))]
    runner.verdict = None
    runner.call(batch(steps), grad=False)
    runner.verdict = verdict
    forwards.append(runner.call(batch(steps + 1)))
    for forward in forwards:
        forward.backward(runner.loss_gradient(forward))
    both = runner.gradients()
    return losses, gradients, runner.weights(), joined(runner.model), gathered, both, verdict.split


def joined(model: nn.Module) -> list[int]:
    """Returns the numbers of the blocks that have no unit of their own."""
    return [n for n, one in enumerate(model.blocks) if not (isinstance(one, FSDPModule) and param_groups(one))]


def gathered_bytes(model: nn.Module) -> int:
    """Returns how many bytes of whole parameters are on this worker beside its shards."""
    groups = [group for submodule in fsdp_modules(model) for group in param_groups(submodule)]
    outputs = [output for group in groups for param in group.fsdp_params for output in param.all_gather_outputs]
    return sum(output.untyped_storage().nbytes() for output in outputs)
