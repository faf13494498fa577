"""Orders of dims in memory, and kernels that decide the order of a convolution's input."""

from __future__ import annotations

import doctest

import pytest
import torch
from torch import nn

from moreh_ap.protocol import memory_format
from moreh_ap.protocol.memory_format import KernelFormats, empty_in_order, in_order, kernel_format, memory_order


def test_examples_in_docstrings():
    outcome = doctest.testmod(memory_format)
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.empty(2, 3), ()),
        (torch.empty(2, 3).t(), (1, 0)),
        (torch.empty(2, 3, 4).transpose(0, 1), (1, 0, 2)),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), (0, 2, 3, 4, 1)),
        (torch.empty(2, 8)[:, ::2], ()),
        (torch.empty(3, 1).expand(3, 4), ()),
        (torch.eye(3).to_sparse(), ()),
    ],
)
def test_the_order_of_a_tensor(tensor, order):
    assert memory_order(tensor) == order


@pytest.mark.parametrize("order", [(), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_an_order_is_made_and_found_again(order):
    made = empty_in_order((2, 3, 4), order, torch.float64)
    assert made.shape == (2, 3, 4) and made.dtype == torch.float64 and memory_order(made) == order


def test_values_stay_where_the_order_changes_and_nothing_is_copied_where_it_does_not():
    tensor = torch.arange(6.0).reshape(2, 3)
    turned = in_order(tensor, (1, 0))
    assert torch.equal(turned, tensor) and turned.stride() == (1, 2)
    assert in_order(tensor, ()) is tensor and in_order(turned, (1, 0)) is turned


def test_a_kernel_s_format_is_told_by_its_strides():
    kernel = nn.Conv2d(2, 3, 5).weight
    assert kernel_format(kernel) is torch.contiguous_format
    assert kernel_format(kernel.to(memory_format=torch.channels_last)) is torch.channels_last
    assert kernel_format(nn.Linear(2, 3).weight) is torch.contiguous_format


def test_an_image_is_brought_into_the_format_of_its_kernel_until_that_is_the_usual_one_again():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Linear(4, 4))
    formats, image, seen = KernelFormats(model), torch.randn(2, 2, 4, 4), []
    expected = model[0](image)
    model[0].register_forward_hook(lambda module, args, output: seen.append(args[0]))
    last = torch.channels_last
    formats.set({"0.weight": last, "0.bias": last, "1.weight": last, "elsewhere.weight": last})
    torch.testing.assert_close(model[0](image), expected)
    model[0](image[0])
    model[1](image)
    formats.set({"0.weight": torch.contiguous_format})
    model[0](image)
    assert [one.is_contiguous(memory_format=last) for one in seen if one.ndim == 4] == [True, False]
    assert seen[1].is_contiguous(), "an image without a batch has no such format"
    assert image.is_contiguous()
