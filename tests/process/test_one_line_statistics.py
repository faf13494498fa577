"""Normalisation over the batch, and random numbers inside forward: those of one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import nn


@pytest.fixture(params=["replicate=2", "shard=2"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


NORMS = {
    "batch 2d": lambda: nn.BatchNorm2d(4),
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "without running statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "synchronised": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(4)),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_are_those_of_the_whole_batch(name):
    def script(device):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(4) if name == "synchronised" and device == "cpu" else NORMS[name]()
        model = nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trace = []
        for rows in (6, 5, 3):
            x, y = torch.randn(rows, 1, 6, 6).to(device), torch.randint(0, 3, (rows,)).to(device)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trace.append(loss.detach())
        trace += [buffer.float() for buffer in model.buffers()]
        model.eval()
        with torch.no_grad():
            trace.append(model(torch.ones(4, 1, 6, 6, device=device)))
        return trace

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


def test_batch_norm_of_features_and_a_part_that_is_frozen():
    def script(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(
            device
        )
        model[3].eval()
        losses = []
        for rows in (8, 2, 7):
            loss = model(torch.randn(rows, 4).to(device)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        return losses, [parameter.grad for parameter in model.parameters()], list(model.buffers())

    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)


class Noisy(nn.Module):
    """Draws random numbers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.linear(x) + scale * torch.randn_like(x)


def test_random_numbers_in_forward_are_own_ones_for_each_row_and_follow_the_seed():
    torch.manual_seed(0)
    model, x = Noisy().cuda(), torch.ones(8, 4, device="cuda")
    torch.manual_seed(1)
    first, second = model(x, 1.0).detach().cpu(), model(x, 1.0).detach().cpu()
    torch.manual_seed(1)
    assert torch.equal(first, model(x, 1.0).detach().cpu()) and not torch.equal(first, second)
    assert len({tuple(row) for row in first.tolist()}) == 8, "two workers drew the same"
