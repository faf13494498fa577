"""Optimizers of workers step as one kernel where the script has not said how they step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.runtime.worker.worker_optimizer import WorkerOptimizer, fuse_where_possible


def _steps(optimizer, parameter):
    for number in range(3):
        parameter.grad = torch.linspace(-1.0, 1.0, 32) * (number + 1)
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_step_gives_the_same_weights(cls):
    def built():
        parameter = nn.Parameter(torch.linspace(1.0, 2.0, 32))
        return cls([parameter], lr=0.1, amsgrad=True), parameter

    (plain, first), (fused, second) = built(), built()
    fuse_where_possible(fused)
    assert fused.param_groups[0]["fused"] is True and plain.param_groups[0]["fused"] is None
    torch.testing.assert_close(_steps(fused, second), _steps(plain, first), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("said", [{"fused": False}, {"foreach": True}, {"capturable": True}, {"differentiable": True}])
def test_what_the_script_has_said_stays(said):
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], **said)
    before = dict(optimizer.param_groups[0])
    fuse_where_possible(optimizer)
    assert optimizer.param_groups[0] == before


def test_other_classes_stay_as_they_are():
    class Own(torch.optim.AdamW):
        """Steps in a way of its own."""

    for cls in (Own, torch.optim.SGD):
        optimizer = cls([nn.Parameter(torch.ones(2))])
        fuse_where_possible(optimizer)
        assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_gradients_in_another_order_than_weights_are_taken_for_what_they_are(order):
    def built():
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(2, 3, 4, 5))
        weight.grad = torch.randn(2, 3, 4, 5).contiguous(memory_format=order)
        return torch.optim.AdamW([weight], lr=0.1), weight

    (plain, wanted), (optimizer, weight) = built(), built()
    worker = WorkerOptimizer.__new__(WorkerOptimizer)
    worker._optimizer, worker._fused_on_cpu, worker._offloaded = optimizer, fuse_where_possible(optimizer), None
    worker._lacks_fused_step = worker._is_on_host = False
    for _ in range(2):
        plain.step()
        worker.step({}, {})
    assert optimizer.param_groups[0]["fused"] is (order is torch.contiguous_format)
    torch.testing.assert_close(weight, wanted, rtol=1e-6, atol=1e-6)
