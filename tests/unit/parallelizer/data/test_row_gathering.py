"""Where rows are in a tensor, and how it is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.parallelizer.data.row_gathering import (
    Placements,
    Rows,
    function_name,
    is_question,
    leaves_of,
    map_leaves,
)


@pytest.mark.parametrize(("placement", "wanted"), [(Rows(0), [2, 3, 4, 5]), (Rows(0, 2), [1, 2, 4, 5])])
def test_rows_of_a_slice(placement, wanted):
    tensor = torch.arange(6).view(6, 1).expand(6, 2)
    rows = 3
    assert placement.narrow(tensor, rows, 1, 3)[:, 0].tolist() == wanted


def test_rows_elsewhere_than_in_the_first_dim():
    assert Rows(1).narrow(torch.arange(6).view(2, 3), 3, 2, 3).tolist() == [[2], [5]]


def test_leaves_in_a_fixed_order_and_in_all_containers():
    tensor = torch.ones(2)
    value = ((slice(1, None), [tensor, {"a": torch.Size([3, 4])}]), {"dim": 0})
    assert [leaf if leaf is not tensor else "tensor" for leaf in leaves_of(value)] == [1, None, None, "tensor", 3, 4, 0]
    changed = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, value)
    assert changed == ((slice(2, None), [tensor, {"a": (4, 5)}]), {"dim": 1})


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


def test_what_asks_for_no_entries():
    questions = [Tensor.size, Tensor.shape.__get__, Tensor.dim, Tensor.is_floating_point, Tensor.__len__]
    assert all(map(is_question, questions))
    assert not any(map(is_question, [Tensor.item, Tensor.T.__get__, Tensor.is_nonzero, torch.eye, Tensor.__bool__]))
    assert function_name(Tensor.T.__get__) == "T.__get__"


class Tracked(list[int]):
    """Made with one list, as containers of libraries are."""


def test_a_list_of_a_librarys_class_stays_a_list_of_that_class() -> None:
    mapped = map_leaves(lambda leaf: leaf + 1, Tracked([0, 2]))
    assert type(mapped) is Tracked and mapped == [1, 3]
