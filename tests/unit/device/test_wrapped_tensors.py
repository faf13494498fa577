"""Tensors of a library's own class with tensors inside, as quantized optimizer states are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moreh_ap.device import wrapped_tensors
from moreh_ap.patching import Patches


class Scaled(Tensor):
    """Whole numbers and a scale, seen as their product."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, strides: Any) -> Scaled:
        return Scaled(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def value(leaf: Any) -> Any:
            return leaf.codes * leaf.scale if isinstance(leaf, Scaled) else leaf

        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_((args[1] / args[0].scale).round())
            return args[0]
        return func(*map(value, args), **(kwargs or {}))


@pytest.fixture(autouse=True)
def installed():
    patches = Patches()
    wrapped_tensors.install(patches)
    yield
    patches.undo()


def test_it_moves_with_what_is_inside_and_keeps_its_class():
    here = Scaled(torch.arange(4, dtype=torch.int32), torch.tensor(0.5))
    there = here.to("cuda")
    assert type(there) is Scaled and there.codes.is_cuda and there.scale.is_cuda
    assert there.device == torch.device("cuda:0") and there.is_cuda
    assert there.to("cuda") is there and there.cuda() is there
    back = there.to("cpu")
    assert type(back) is Scaled and type(back.codes) is Tensor and back.device.type == "cpu" and not back.is_cuda


def test_one_that_is_made_of_accelerator_tensors_takes_part_in_operations_and_changes_in_place():
    state = Scaled(torch.zeros(4, dtype=torch.int32, device="cuda"), torch.tensor(0.5, device="cuda"))
    state.copy_(torch.arange(4.0, device="cuda"))
    assert state.codes.tolist() == [0, 2, 4, 6]
    weights = torch.ones(4, device="cuda")
    for total in (state + weights, weights + state):
        assert total.is_cuda and total.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_arguments_that_a_transform_gives_a_function_are_where_the_script_s_are():
    def function(x: Tensor) -> Tensor:
        assert x.device.type == "cuda" and x.is_cuda
        return (x * torch.arange(3.0, device=x.device)).sum()

    x = torch.ones(3).cuda()
    assert torch.equal(torch.func.grad(function)(x).cpu(), torch.arange(3.0))
    assert torch.func.vmap(function)(torch.ones(2, 3).cuda()).tolist() == [3.0, 3.0]
