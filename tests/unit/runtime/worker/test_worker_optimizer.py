"""Optimizers of a GPU's worker step as one kernel where the script has not said how they step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moreh_ap.runtime.worker.worker_optimizer import fuse_where_possible


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
