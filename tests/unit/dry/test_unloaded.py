"""Tensors with a shape and no numbers: operations give shapes, and reading a number is an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.dry import unloaded
from moreh_ap.errors import UnsupportedError


def weight(*shape: int) -> VirtualTensor:
    return unloaded.unloaded(torch.empty(shape, device="meta"), ACCELERATOR)


def test_operations_give_shapes_without_memory():
    large = weight(2**20, 2**20)  # four tebibytes
    product = large[:, :8].t() @ large
    assert product.shape == (8, 2**20) and product.is_cuda and isinstance(product, VirtualTensor)
    assert large.to(torch.bfloat16).dtype is torch.bfloat16
    assert (large * 2 + 1).sum(dim=0).shape == (2**20,)


def test_changes_in_place_are_dropped_and_the_tensor_stays():
    tensor = weight(4, 4)
    assert tensor.normal_().mul_(2) is tensor
    assert nn.init.kaiming_uniform_(tensor) is tensor
    other = weight(4, 4)
    other.copy_(tensor)
    with pytest.raises(UnsupportedError, match="value of a weight"):
        other.cpu()


@pytest.mark.parametrize("read", [lambda t: t.sum().item(), lambda t: t.cpu(), lambda t: bool((t > 0).any()), str])
def test_reading_a_number_is_an_error_that_says_what_to_do(read):
    with pytest.raises(UnsupportedError, match="value of a weight") as error:
        read(weight(3, 3))
    assert len(str(error.value).splitlines()) == 4 and "--with-weights" in str(error.value)


def test_an_error_of_shapes_is_pytorchs():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        weight(3, 3) @ weight(4, 4)


def test_a_parameter_without_memory_keeps_what_it_is():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    parameter.mark = "kept"
    made = unloaded.without_memory(parameter)
    assert isinstance(made, nn.Parameter) and made.device.type == "cpu"
    assert made.dtype is torch.bfloat16 and not made.requires_grad and made.mark == "kept"
    assert (made + 1).device.type == "cpu"
