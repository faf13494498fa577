"""What function modes of a forward see of FSDP2: nothing that it does with parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.surroundings import unseen_gathers
from moreh_ap.patching import Patches


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Callers(TorchFunctionMode):
    """Notes the functions that are running, for each call of a torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[set[str]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names, frame = set(), sys._getframe(1)
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        self.seen.append(names)
        return func(*args, **(kwargs or {}))


def trained(mesh: DeviceMesh) -> tuple[list[set[str]], list[torch.Tensor]]:
    """Returns what a mode sees of a forward, and the result with the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model(torch.ones(2, 8))  # which sets FSDP2 up
    with Callers() as callers:
        result = model(torch.ones(2, 8))
    result.float().square().sum().backward()
    return callers.seen, [result.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]


def test_a_mode_sees_the_layers_and_not_the_gathers(mesh: DeviceMesh):
    before, wanted = trained(mesh)
    patches = Patches()
    unseen_gathers.install(patches)
    try:
        after, found = trained(mesh)
    finally:
        patches.undo()
    gathers = {"unshard", "wait_for_unshard", "reshard"}
    assert sum(not gathers.isdisjoint(names) for names in before) > len(before) / 2
    assert after == [names for names in before if gathers.isdisjoint(names)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
