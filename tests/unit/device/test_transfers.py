"""Moves between the CPU and the accelerator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moreh_ap.device import checkpoint_tensors, transfers
from moreh_ap.errors import LoadError, UnsupportedError
from moreh_ap.protocol.tensor_source import TensorSource


class Copies(TorchDispatchMode):
    """Counts the bytes that operations on ordinary tensors write into new ones."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and not func.is_view:
            self.num_bytes += result.nbytes
        return result


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


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float16}, {"memory_format": torch.channels_last}, {"dtype": torch.float32}], ids=str
)
def test_a_move_with_a_cast_copies_once_and_later_changes_do_not_matter(changes):
    batch = torch.randn(2, 3, 4, 4)
    expected = batch.clone().to(**changes)
    with Copies() as copies:
        moved = batch.to("cuda", **changes)
    batch.zero_()
    assert copies.num_bytes == expected.nbytes
    assert moved.is_cuda and moved.stride() == expected.stride() and torch.equal(moved.cpu(), expected)


def test_a_batch_that_is_moved_before_it_is_brought_into_another_order_is_copied_once():
    batch = torch.randn(2, 3, 4, 4)
    with Copies() as copies:
        moved = batch.cuda()
    ordered = moved.to(memory_format=torch.channels_last)
    assert copies.num_bytes == batch.nbytes
    batch.zero_()
    assert ordered.is_contiguous(memory_format=torch.channels_last) and not torch.equal(ordered.cpu(), batch)
    assert ordered.to(memory_format=torch.channels_last) is ordered


def test_a_move_with_a_cast_keeps_its_graph():
    leaf = torch.ones(3, requires_grad=True)
    (leaf.to("cuda", torch.float64) * 2).sum().backward()
    assert leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad, torch.full((3,), 2.0))


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


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_does_not_move(layout):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    with pytest.raises(UnsupportedError, match=r"nested tensor(.|\n)*Padded tensors(.|\n)*layout=torch.jagged"):
        nested.to("cuda")
