"""Modules of which each worker may compute a part, and modules of which none may."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moreh_ap.parallelizer.row_dims.dealt_modules import dealt_along, dealt_tensor, with_part
from moreh_ap.parallelizer.row_dims.row_steps import Rows


class Of(nn.Module):
    """Calls a function."""

    def __init__(self, function, *args):
        super().__init__()
        self.function, self.args = function, args
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor):
        return self.function(self.linear(x), *self.args)


def along(module: nn.Module, entries: int = 5) -> Rows | None:
    torch.manual_seed(0)
    return dealt_along(module, ((torch.randn(entries, 4),), {}), lambda one, other: torch.allclose(one, other))


@pytest.mark.parametrize(
    ("module", "wanted"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Rows(0)),
        (Of(torch.t), Rows(1)),
        (Of(F.dropout, 0.0), Rows(0)),
        (Of(F.dropout, 0.5, False), Rows(0)),
        (Of(F.dropout, 0.5), None),  # each worker would draw the numbers of another part
        (Of(torch.randn_like), None),
        (Of(torch.softmax, 0), None),
        (Of(lambda x: x.sum(0)), None),
        (Of(lambda x: (x, x)), None),
        (Of(lambda x: x * (x[:, :1] > 0).cumsum(0).clamp(max=1)), None),
        (Of(lambda x: x[0] + x[4]), None),
    ],
)
def test_a_module_is_dealt_out_that_computes_entries_one_by_one_and_draws_nothing(module, wanted):
    assert along(module) == wanted


def test_one_entry_is_not_dealt_out():
    assert along(nn.Linear(4, 4), entries=1) is None


def test_one_tensor_of_numbers_is_dealt_out():
    x = torch.randn(3, 2)
    assert dealt_tensor([x, 2, "a"]) is x
    assert dealt_tensor([x, x.clone()]) is None and dealt_tensor([x.long()]) is None and dealt_tensor([x[:, 0]]) is None
    args, kwargs = with_part(x, 1, 3, ((x,), {"scale": 2}))
    assert torch.equal(args[0], x[1:]) and kwargs == {"scale": 2}
