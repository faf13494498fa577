"""Sums over what the submodules of a model return."""

from __future__ import annotations

import torch
from torch import nn

from moreh_ap.protocol.messages.models import ModuleSum
from moreh_ap.runtime.worker.commands.module_sums import ModuleSums


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x):
        y = self.inner(x)
        return {"twice": 2 * y, "index": torch.arange(3)}


def test_submodules_are_summed_in_the_order_in_which_they_end():
    model = Pair()
    sums = ModuleSums(model)
    model(torch.tensor([1.0, 2.0]))
    model(torch.tensor([3.0]))
    expected = (ModuleSum("inner", 3, 6.0, 14.0), ModuleSum("", 3, 12.0, 56.0))
    assert sums.close() == expected
    model(torch.ones(2))
    assert sums.close() == expected, "the hooks are gone"
