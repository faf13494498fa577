"""Where rows are in a tensor, and how it is known."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.row_dims.placements import Placements
from moreh_ap.parallelizer.row_dims.row_steps import Rows, Step, in_any_order


@pytest.mark.parametrize(("placement", "wanted"), [(Rows(0), [2, 3, 4, 5]), (Rows(0, 2), [1, 2, 4, 5])])
def test_rows_of_a_slice(placement, wanted):
    tensor = torch.arange(6).view(6, 1).expand(6, 2)
    rows = 3
    assert placement.narrow(tensor, rows, 1, 3)[:, 0].tolist() == wanted


def test_rows_elsewhere_than_in_the_first_dim():
    assert Rows(1).narrow(torch.arange(6).view(2, 3), 3, 2, 3).tolist() == [[2], [5]]


def test_rows_elsewhere_are_as_dense_as_all_rows_are():
    own = Rows(1).narrow(torch.arange(12).view(3, 4), 4, 2, 4)
    assert own.view(-1).tolist() == [2, 3, 6, 7, 10, 11]


def test_a_tensor_is_known_with_its_aliases_until_it_is_gone():
    placements = Placements()
    tensor = torch.ones(3)
    placements[tensor] = Rows(0)
    assert placements.get(tensor) == Rows(0)
    assert placements.get(tensor.detach()) == Rows(0)
    assert placements.get(tensor[:2]) is None
    assert placements.get(torch.ones(3)) is None
    placements.forget(tensor)
    assert placements.get(tensor) is None


def test_steps_of_several_ways_are_told_apart_by_their_places():
    one, other = Step("exp", site=1, results=(Rows(0),)), Step("exp", site=2, gathers=True)
    assert in_any_order([one, other, one]) == (one, other)
    assert in_any_order([one, Step("exp", site=1, gathers=True)]) is None
