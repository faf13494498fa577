"""Optimizer state in host memory gives the numbers of state on the device."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallelizer_team import Team
from torch import Tensor, nn
from torch.optim import Optimizer

from moreh_ap.parallelizer.apply import apply_plan
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.parallelizer.state.loading import full_tensor
from moreh_ap.parallelizer.state.state_shard import StateShard
from moreh_ap.plan import Plan
from moreh_ap.protocol.messages.optimizers import BuildOptimizer
from moreh_ap.protocol.messages.tensors import StateRef
from moreh_ap.runtime.worker.optimizer_offload import OffloadedState
from moreh_ap.runtime.worker.worker_device import WorkerDevice
from moreh_ap.runtime.worker.worker_optimizer import WorkerOptimizer
from moreh_ap.session.models.known_optimizers import elementwise_optimizers

pytestmark = pytest.mark.rotating  # one more plan each

BUCKETS = [1, 100, 10**9]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3), nn.Linear(3, 4))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    first, *rest = model.parameters()
    return [{"params": [first, rest[0]]}, {"params": rest[1:], "lr": 3e-3}]


def train(optimizer: Optimizer, model: nn.Module, step: Callable[[], object]) -> list[Tensor]:
    for turn in range(4):
        optimizer.zero_grad()
        values = torch.randn(6, 5, generator=torch.Generator().manual_seed(turn))
        frozen = turn == 2  # a parameter without a gradient now and then
        model[3].requires_grad_(not frozen)
        model(values).square().sum().backward()
        optimizer.param_groups[0]["lr"] *= 0.9
        step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("kind", elementwise_optimizers(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_optimizer_that_workers_run(kind: type[Optimizer], bucket_bytes: int) -> None:
    model, other = make_model(), make_model()
    plain = kind(groups_of(model), lr=1e-2)
    wanted = train(plain, model, plain.step)
    optimizer = kind(groups_of(other), lr=1e-2)
    got = train(optimizer, other, OffloadedState(optimizer, bucket_bytes).step)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert plain.state[a].keys() == optimizer.state[b].keys()
        for key, value in plain.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(optimizer.state[b][key]))


def test_groups_are_whole_again_after_a_step_that_raised() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(groups_of(model), lr=1e-2)
    optimizer.register_step_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("no step")))
    with pytest.raises(ValueError, match="no step"):
        OffloadedState(optimizer, 1).step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_one_bucket_at_a_time() -> None:
    """Every parameter is stepped once, and the bytes of a bucket are what was asked for."""
    model = make_model()
    optimizer = torch.optim.SGD(groups_of(model), lr=1e-2)
    seen: list[list[int]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([param.numel() * 4 for group in optimizer.param_groups for param in group["params"]])
    )
    OffloadedState(optimizer, 100).step()
    assert [size for bucket in seen for size in bucket] == [param.numel() * 4 for param in model.parameters()]
    assert len(seen) > 1
    assert all(sum(bucket[:-1]) < 100 for bucket in seen)


def sharded(rank: int, world: int, bucket_bytes: int) -> tuple[bool, list[Tensor]]:
    """Returns whether state is split like its parameter, and the weights after training on shards."""
    model = make_model()
    plan = Plan(shard=world)
    applied = apply_plan(model, plan, build_mesh(plan, "cpu"))
    groups = [[StateShard(one, applied.position) for one in group["params"]] for group in groups_of(model)]
    refs = tuple(tuple(StateRef("model0", "param", "") for _ in group) for group in groups)
    command = BuildOptimizer("optimizer0", pickle.dumps(torch.optim.AdamW), refs, {"lr": 1e-2})
    optimizer = WorkerOptimizer(command, groups, WorkerDevice(rank, world, "cpu"))
    stepped: Any = optimizer._optimizer
    stepped.param_groups[1]["lr"] = 3e-3
    if bucket_bytes:
        optimizer._offloaded = OffloadedState(stepped, bucket_bytes)
    stepped.zero_grad = model.zero_grad  # clears the gradients of the shards
    weights = train(stepped, model, lambda: optimizer.step({}, {}))
    shards = [one.to_local() for one in weights]
    own = [one for group in stepped.param_groups for one in group["params"]]
    assert [one.data_ptr() for one in own] == [one.data_ptr() for one in shards]  # FSDP2 has left them their memory
    states = [(value, held) for _, _, value, held in optimizer.states()]
    split = len(states) == 2 * len(own) and all(value.shape == held.local.shape for value, held in states)
    return split, [full_tensor(one).clone() for one in weights]


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
def test_shards(team: Team, bucket_bytes: int) -> None:
    wanted = team.run(2, sharded, bucket_bytes=0)
    got = team.run(2, sharded, bucket_bytes=bucket_bytes)
    for (split, weights), (_, others) in zip(got, wanted, strict=True):
        assert split
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
