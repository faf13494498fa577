"""What a plan makes of a module on one device."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moreh_ap.parallelizer.apply import apply_plan
from moreh_ap.parallelizer.data.fsdp import prepare, settle
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.plan import Plan

CPU = torch.device("cpu")


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).relu()
        return x


@pytest.fixture
def one_device(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def applied(module: nn.Module, text: str) -> None:
    plan = Plan.parse(text)
    apply_plan(module, plan, build_mesh(plan, "cpu"), CPU)
    prepare(module)


def made(dtype: torch.dtype) -> Blocks:
    torch.manual_seed(0)
    return Blocks().to(dtype)


def test_weights_in_the_precision_of_the_plan_are_not_copied(one_device):
    module, used = made(torch.bfloat16), []
    places = [block.weight.data_ptr() for block in module.blocks]
    applied(module, "precision=bf16")
    for block in module.blocks:
        block.register_forward_pre_hook(lambda block, args: used.append(block.weight.data_ptr()))
    module(torch.ones(2, 4))
    assert used == places


def test_they_have_the_gradients_of_one_process(one_device):
    module, x = made(torch.bfloat16), torch.randn(5, 4)
    alone = copy.deepcopy(module)
    alone(x.bfloat16()).float().square().sum().backward()
    applied(module, "precision=bf16")
    result = module(x)
    result.square().sum().backward()
    settle(module)
    assert result.dtype == torch.float32
    for found, wanted in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found.grad, wanted.grad)


def test_weights_in_another_precision_are_cast_and_adapters_beside_them_too(one_device):
    frozen, seen = made(torch.bfloat16).requires_grad_(False), []
    frozen.first.float().requires_grad_(True)
    applied(frozen, "precision=bf16")
    for layer in (frozen.first, frozen.blocks[0]):
        layer.register_forward_pre_hook(lambda layer, args: seen.append((layer.weight.dtype, args[0].dtype)))
    frozen(torch.ones(2, 4)).sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)] * 2
    assert frozen.first.weight.grad.dtype == torch.float32


def test_a_plan_that_does_not_shard_leaves_ordinary_parameters(one_device):
    module = made(torch.float32)
    applied(module, "precision=bf16")
    assert all(type(one) is nn.Parameter and one.dtype == torch.float32 for one in module.parameters())


def test_a_recurrent_layer_leaves_weights_where_fsdp_gathers_them(one_device, monkeypatch):
    """On a GPU it moves them at its next call, and FSDP2 would gather those of later steps elsewhere."""
    moved: list[nn.Module] = []
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", lambda layer: moved.append(layer))
    x = torch.randn(2, 3, 4)
    alone = nn.LSTM(4, 4)
    assert moved == [alone]
    module = copy.deepcopy(alone)
    applied(module, "offload=all")
    for layer in (alone, module):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            layer(x)[0].square().sum().backward()
            settle(module)
            optimizer.step()
            optimizer.zero_grad()
    assert not any(one is module for one in moved)
    assert torch.equal(module(x)[0], alone(x)[0])


@pytest.mark.parametrize("text", ["precision=bf16,micro_batches=2", "precision=bf16,offload=all"])
def test_fsdp_keeps_weights_whose_gradients_it_adds_up_or_that_lie_in_host_memory(one_device, text):
    module = made(torch.bfloat16)
    applied(module, text)
    assert all(isinstance(one, DTensor) for one in module.parameters())
