"""Operations on tensors of the accelerator, computed here, put off, or refused."""

from __future__ import annotations

import pytest
import torch

from unit.device.samples import promise


def test_mixing_devices_raises_pytorch_s_error():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3).cuda() + torch.ones(3)
    assert (torch.ones(3).cuda() + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]


def test_views_and_in_place_operations_share_memory():
    tensor = torch.arange(6.0).reshape(2, 3).cuda()
    tensor[:, 1:].zero_()
    assert tensor.tolist() == [[0, 0, 0], [3, 0, 0]]
    labels = torch.arange(4).cuda()
    labels[torch.tensor([True, False, True, False]).cuda()] = -100
    assert labels.tolist() == [-100, 1, -100, 3]
    tensor.unsqueeze_(0)
    assert tensor.shape == (1, 2, 3)


def test_arithmetic_on_a_promise_does_not_wait():
    value, loss = promise(torch.tensor(3.0))
    total = torch.zeros((), device="cuda")
    total += loss.detach()
    scaled = loss / 4
    grown = torch.ones_like(loss)
    assert scaled.shape == () and grown.item() == 1.0
    value.arrived = True
    assert scaled.item() == 0.75 and total.item() == 3.0


def test_in_place_changes_after_a_deferred_operation_do_not_reach_it():
    value, loss = promise(torch.tensor(2.0))
    factor = torch.tensor(5.0).cuda()
    product = loss * factor
    factor.add_(1)
    alias = loss.detach()
    value.arrived = True
    alias.mul_(100)
    assert product.item() == 10.0 and loss.item() == 200.0
