"""Which blocks FSDP2 gathers one by one."""

from __future__ import annotations

from torch import nn

from moreh_ap.parallelizer.data.fsdp import with_own_parameters


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(2, 2)


class Model(nn.Module):
    """Blocks of which two have a layer in common, as in TabNet, and one has one in common with what lies in front."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(2, 2) for _ in range(3)]
        self.front, self.blocks = Block(layers[0]), nn.ModuleList(map(Block, [layers[1], layers[1], *layers]))
        self.blocks[3].own.weight = self.blocks[1].shared.weight


def test_a_block_that_shares_a_parameter_stays_with_the_rest_of_the_model():
    model = Model()
    assert with_own_parameters(model, list(model.blocks)) == [model.blocks[4]]
    assert with_own_parameters(model.front, list(model.blocks)) == []
