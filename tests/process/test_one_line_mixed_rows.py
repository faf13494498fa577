"""Forwards that mix rows of the batch in another order: each worker draws the order of all, and computes its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = pytest.mark.rotating  # one more way to mix each

WHOLE = "Every device computes the whole batch"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 5))

    def mixed_loss(self, x: Tensor, first: Tensor, second: Tensor, share: float | Tensor) -> Tensor:
        result = self.net(x)
        return share * F.cross_entropy(result, first) + (1 - share) * F.cross_entropy(result, second)


class Mixup(Classifier):
    """The share is one number of PyTorch's stream."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = torch.distributions.Beta(0.4, 0.4).sample().to(x.device)
        order = torch.randperm(x.size(0)).to(x.device)
        return self.mixed_loss(share * x + (1 - share) * x[order], y, y[order], share)


class MixupOfHidden(Mixup):
    """Manifold mixup: what the first layer gives is mixed, and NumPy draws the share."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = float(np.random.beta(1.0, 1.0))
        hidden, order = self.net[0](x), torch.randperm(len(y)).to(x.device)
        hidden = share * hidden + (1 - share) * hidden[order]
        result = self.net[1:](hidden)
        return share * F.cross_entropy(result, y) + (1 - share) * F.cross_entropy(result, y[order])


class CutMix(Classifier):
    """A box of each picture is that of another one; NumPy draws where."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share, (_, _, height, width) = np.random.beta(1.0, 1.0), x.shape
        order = torch.randperm(x.size(0), device=x.device)
        half = int(width * np.sqrt(1 - share)) // 2
        across, down = np.random.randint(width), np.random.randint(height)
        left, right = np.clip(across - half, 0, width), np.clip(across + half, 0, width)
        top, bottom = np.clip(down - half, 0, height), np.clip(down + half, 0, height)
        x = x.clone()
        x[:, :, top:bottom, left:right] = x[order, :, top:bottom, left:right]
        return self.mixed_loss(x, y, y[order], 1 - float((right - left) * (bottom - top)) / (width * height))


class Reversed(Classifier):
    """As timm: rows are mixed with those from the other end of the batch, in place, and so are soft labels."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = float(np.random.beta(0.8, 0.8))
        x = x.mul(share).add_(x.flip(0).mul_(1 - share))
        labels = F.one_hot(y, 5).float()
        labels = labels * share + labels.flip(0) * (1 - share)
        return torch.sum(-labels * F.log_softmax(self.net(x), dim=-1), dim=-1).mean()


@pytest.mark.parametrize("plan", ["replicate=2", "shard=3"])
@pytest.mark.parametrize("model_class", [Mixup, MixupOfHidden, CutMix, Reversed])
def test_mixed_rows_are_those_of_one_device_and_each_worker_computes_its_rows(model_class, plan, accelerator, capsys):
    def script(device):
        np.random.seed(0)
        model = model_class().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for rows in (8, 8, 6, 7):
            x, y = torch.randn(rows, 1, 8, 8), torch.randint(0, 5, (rows,))
            loss = model(x.to(device), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, model.state_dict(), torch.rand(3)

    accelerator(plan)
    assert_same(*on_both(script), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out
