"""Host memory for an optimizer's state: little is lost to PyTorch's rounding, and no two tensors share any."""

from __future__ import annotations

import torch

from moreh_ap.runtime.worker.optimizer_offload import HostSlabs


def test_tensors_of_any_size_are_cut_from_slabs_of_powers_of_two():
    shapes = [(128, 300), (5000,), (700, 500), (3, 2, 2), (0,), (), (150, 1000)] * 12
    needed = sum(torch.Size(shape).numel() * 4 for shape in shapes)
    slabs = HostSlabs(needed, pin=False)
    taken = [slabs.take(torch.empty(shape)).fill_(number) for number, shape in enumerate(shapes)]
    for number, (tensor, shape) in enumerate(zip(taken, shapes)):
        assert tensor.shape == shape and (tensor == number).all(), "no tensor lies in another"
    each_rounded_up = sum(1 << max(0, tensor.numel() * 4 - 1).bit_length() for tensor in taken)
    assert each_rounded_up > 1.4 * needed and slabs.num_bytes < 1.15 * needed


def test_dtype_and_order_of_dims_are_those_of_the_state():
    slabs = HostSlabs(1 << 12, pin=False)
    slabs.take(torch.empty(3, dtype=torch.uint8))
    like = torch.randn(2, 3, 4, 4).to(torch.bfloat16, memory_format=torch.channels_last)
    taken = slabs.take(like)
    taken.copy_(like)
    assert taken.dtype == like.dtype and taken.stride() == like.stride() and torch.equal(taken, like)
