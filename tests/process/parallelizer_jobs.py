"""What each process does in the parallelizer's tests."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from parallelizer_models import ADAMW, ROWS, make_batch, make_model
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.parallelizer.apply import apply_plan, settle
from moreh_ap.parallelizer.batch import row_range, slice_rows
from moreh_ap.parallelizer.forward import Call
from moreh_ap.parallelizer.loading import full_tensor
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.proof import SplitProof, prove_split
from moreh_ap.parallelizer.run import run_forward
from moreh_ap.plan import Plan

CPU = torch.device("cpu")


class Runner:
    """Calls a model under a plan as a worker would: proof first, then each batch in this worker's rows."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.meta = copy.deepcopy(model).to("meta")
        self.model = model
        apply_plan(model, plan, build_mesh(plan, "cpu"))
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.proof: SplitProof | None = None

    def call(self, batch: dict[str, Any], *, grad: bool = True, **extra: Any) -> Any:
        """Returns the forward of a global batch of named tensors."""
        leaves, spec = tree_flatten(batch)
        rows = leaves[0].shape[0]
        call = Call(self.model, "whole", CPU, grad=grad, seed=3, **extra)
        if self.proof is None:
            self.proof = prove_split(call, (), batch, rows)
        if self.proof.split and rows >= self.world:
            call = Call(self.model, "split", CPU, grad=grad, seed=3, kinds=self.proof.kinds, **extra)
            batch = tree_unflatten(slice_rows(leaves, rows, *row_range(self.rank, self.world, rows)), spec)
        self.mode = call.mode
        return run_forward(
            call, (), batch, micro_batches=self.plan.micro_batches, rows=rows, meta_module=self.meta
        )

    def value(self, forward: Any, leaf: int = 0) -> Tensor:
        """Returns what the leaf of the result is on one device."""
        part = forward.materialize()[leaf]
        kind = self.proof.kinds[leaf] if self.mode == "split" else "same"
        if kind == "share":
            part = part.clone()
            dist.all_reduce(part)
        elif kind == "rows":
            parts: list[Any] = [None] * self.world
            dist.all_gather_object(parts, part)
            part = torch.cat(parts)
        return part

    @staticmethod
    def loss_gradient(forward: Any, factor: float = 1.0) -> list[Tensor | None]:
        """Returns output gradients that start at the loss, which comes first in all results here."""
        return [torch.tensor(factor), *[None] * (forward.treespec.num_leaves - 1)]

    def weights(self) -> dict[str, Tensor]:
        """Returns all weights, whole."""
        settle(self.model)
        return {name: full_tensor(param) for name, param in self.model.named_parameters()}

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns all gradients, whole."""
        settle(self.model)
        return {
            name: None if param.grad is None else full_tensor(param.grad)
            for name, param in self.model.named_parameters()
        }


def train(rank: int, world: int, name: str, plan: str, steps: int, rows: int = ROWS) -> Any:
    """Returns mode, losses and final weights."""
    runner = Runner(make_model(name).train(), Plan.parse(plan))
    optimizer = torch.optim.AdamW(runner.model.parameters(), **ADAMW)
    losses = []
    for step in range(steps):
        forward = runner.call(make_batch(name, step, rows))
        early = runner.value(forward).item() if step % 3 == 0 else None  # read before backward now and then
        forward.backward(runner.loss_gradient(forward))
        losses.append(runner.value(forward).item())
        if early is not None and abs(early - losses[-1]) > 1e-6 * abs(early):
            raise AssertionError(f"step {step}: loss {early} before backward, {losses[-1]} after")
        optimizer.step()
        optimizer.zero_grad()
    assert runner.proof is not None
    return runner.mode, runner.proof.reason, losses, runner.weights() if rank == 0 else runner.weights() and None
