"""Which blocks of a model a forward opens, and what noticing it leaves: on one process, where FSDP2 gathers alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moreh_ap.parallelizer.apply import apply_plan
from moreh_ap.parallelizer.data.fsdp import param_groups, settle
from moreh_ap.parallelizer.data.opened_blocks import BlocksOpened, blocks_apart, join, noticing
from moreh_ap.parallelizer.data.outer_layers import unnoticed
from moreh_ap.parallelizer.mesh import build_mesh
from moreh_ap.plan import Plan


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.norm(hidden))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(_Block() for _ in range(3)), nn.Linear(4, 4)
        self.opened: tuple[int, ...] = ()

    def forward(self, hidden: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            hidden = block.up(block.norm(hidden)) if number in self.opened else block(hidden)
        return self.head(hidden)


@pytest.fixture
def model(tmp_path) -> Iterator[nn.Module]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    torch.manual_seed(0)
    made, plan = _Model(), Plan.parse("offload=all")
    apply_plan(made, plan, build_mesh(plan, "cpu"))
    yield made
    dist.destroy_process_group()


def _noticed(model: nn.Module) -> list[str]:
    with noticing(model) as opened:
        try:
            model(torch.ones(2, 4))
        except BlocksOpened:
            settle(model)
        list(model.named_parameters())  # not in a forward
    return opened


def test_a_forward_that_calls_blocks_opens_none_and_leaves_ordinary_dicts(model):
    assert _noticed(model) == []
    assert {type(one._parameters) for one in model.modules()} == {dict}


def test_blocks_whose_parts_are_called_are_named_and_join_the_rest(model):
    wanted = model(torch.ones(2, 4))
    model.opened, before = (0, 2), dict(model.named_parameters())
    assert _noticed(model) == ["blocks.0", "blocks.2"]
    join(model, ["blocks.0", "blocks.2"])
    assert list(blocks_apart(model)) == ["blocks.1"]
    (group,) = param_groups(model)
    assert len(group.fsdp_params) == 2 + 2 * 4
    assert _noticed(model) == []
    torch.testing.assert_close(model(torch.ones(2, 4)), wanted)
    settle(model)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


def test_reads_of_this_package_open_nothing(model):
    def read(module: nn.Module, args: object) -> None:
        with unnoticed():
            list(module.parameters())

    model.blocks[1].register_forward_pre_hook(read, prepend=True)
    assert _noticed(model) == []


def test_after_a_forward_that_raised_nothing_is_opened_when_its_state_is_put_back(model):
    def fail(module: nn.Module, args: object) -> None:
        raise FileNotFoundError("words.txt")

    model.blocks[1].register_forward_pre_hook(fail)
    with noticing(model) as opened:
        with pytest.raises(FileNotFoundError):
            model(torch.ones(2, 4))
        list(model.named_parameters())
    assert opened == []
