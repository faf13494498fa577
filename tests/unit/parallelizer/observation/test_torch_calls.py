"""What is read of a call of a torch function."""

from __future__ import annotations

import torch
from torch import Tensor

from moreh_ap.parallelizer.observation.torch_calls import function_name, is_question, leaves_of, map_leaves


def test_leaves_in_a_fixed_order_and_in_all_containers():
    tensor = torch.ones(2)
    value = ((slice(1, None), [tensor, {"a": torch.Size([3, 4])}]), {"dim": 0})
    assert [leaf if leaf is not tensor else "tensor" for leaf in leaves_of(value)] == [1, None, None, "tensor", 3, 4, 0]
    changed = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, int) else leaf, value)
    assert changed == ((slice(2, None), [tensor, {"a": (4, 5)}]), {"dim": 1})


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


def test_a_list_of_one_tensor_over_and_over_has_two_leaves():
    tensor = torch.ones(2)
    assert [leaf if type(leaf) is int else "tensor" for leaf in leaves_of(([tensor] * 3, 0))] == ["tensor", 3, 0]
    mapped, dim = map_leaves(lambda leaf: leaf + 2 if type(leaf) is int else leaf, ([tensor] * 3, 0))
    assert len(mapped) == 5 and all(one is tensor for one in mapped) and dim == 2
