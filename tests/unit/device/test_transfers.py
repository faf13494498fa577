"""Moves between the CPU and the accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moreh_ap.device import checkpoint_tensors, transfers
from moreh_ap.errors import LoadError
from moreh_ap.protocol.tensor_source import TensorSource


def test_moving_a_parameter_reads_no_value_that_lies_in_a_file():
    stored = checkpoint_tensors.promise_from_file(TensorSource("/no/such/file", "weight"), (2, 3), torch.float32)
    on_cpu, on_cuda = torch.nn.Parameter(stored), torch.nn.Parameter(stored.cuda())
    transfers.swap(on_cpu, on_cuda)
    assert on_cpu.is_cuda and not on_cuda.is_cuda
    with pytest.raises(LoadError, match="/no/such/file"):
        on_cpu.sum().item()


def test_a_tensor_moves_there_and_back():
    tensor = torch.arange(6.0).reshape(2, 3).cuda()
    assert tensor.device == torch.device("cuda:0") and tensor.is_cuda and not tensor.is_cpu
    assert tensor.get_device() == 0 and tensor.type() == "torch.cuda.FloatTensor"
    assert tensor.to("cuda") is tensor and tensor.cuda() is tensor
    back = tensor.cpu()
    assert type(back) is Tensor and torch.equal(back, torch.arange(6.0).reshape(2, 3))
    assert tensor.to("cpu", torch.float64).dtype == torch.float64
    assert tensor.to(torch.float16).is_cuda


def test_other_device_numbers_are_refused():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2).cuda(1)


def test_gradients_flow_through_moves():
    leaf = torch.ones(3, requires_grad=True)
    (leaf.cuda() * 2).sum().backward()
    assert torch.equal(leaf.grad, torch.full((3,), 2.0))
    there = torch.ones(3, device="cuda", requires_grad=True)
    (there.cpu() * 3).sum().backward()
    assert there.grad.is_cuda and there.grad.tolist() == [3.0, 3.0, 3.0]
