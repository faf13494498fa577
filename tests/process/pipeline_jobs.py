"""Jobs for the team of processes: a pipeline without the controller, looked at from inside."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from one_line_models import ragged_batches, tiny_gpt2
from torch import Tensor, nn

from moreh_ap.parallelizer.apply import Example, apply_plan
from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.way_to_execute import way_to_execute
from moreh_ap.parallelizer.data.fsdp import settle
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.state.loading import local_shard
from moreh_ap.plan import Plan

CPU = torch.device("cpu")


def train_tied(rank: int, world: int, plan: str, steps: int) -> dict[str, str]:
    """Trains a GPT-2, whose embedding is its head, and returns fingerprints of this worker's copy before and after."""
    torch.manual_seed(0)
    model = tiny_gpt2()
    meta = copy.deepcopy(model).to("meta")
    meta.tie_weights()  # `to` makes two of one
    batches = [{**batch, "use_cache": False} for batch in ragged_batches(5, 4)]
    wanted = Plan.parse(plan)
    applied = apply_plan(model, wanted, build_mesh(wanted, "cpu"), CPU, Example(meta, (), batches[0]))
    held = [p for name, p in model.named_parameters() if name not in applied.absent]
    start = _fingerprint(model)
    optimizer = torch.optim.AdamW(held, lr=1e-2)
    call = Call(model, "unsplit", CPU, axis=applied.position.data)
    for step in range(steps):
        batch = batches[step % len(batches)]
        run = way_to_execute(call, wanted, 4, meta)(call, (), batch)
        grads: list[Any] = [None] * len(run.shapes)
        grads[0] = torch.ones(())
        run.backward(grads)
        settle(model)
        optimizer.step()
        optimizer.zero_grad()
    return {"start": start, "tied": _fingerprint(model)}


def _fingerprint(model: nn.Module) -> str:
    weight: Tensor = local_shard(model.get_parameter("transformer.wte.weight")).detach()
    return hashlib.sha256(weight.numpy().tobytes()).hexdigest()
