"""Forwards whose end does with rows what steps cannot tell: each worker encodes its rows, and ends with all of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn

pytestmark = pytest.mark.rotating  # one more model or plan each

WHOLE = "Every device computes the whole batch"


@pytest.fixture(params=["replicate=2", "shard=2", "replicate=3"], autouse=True)
def session(request, accelerator):
    return accelerator(request.param)


class Encoder(nn.Module):
    """Encodes rows; what becomes of them is for the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))


class HardestInALoop(Encoder):
    """Goes through the rows in Python; statistics without gradients come first, a small classifier last."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(4, 3)

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        codes_BD = self.encoder(x_BF)
        with torch.no_grad():
            spread = codes_BD.std()
        distances_BB, others = torch.cdist(codes_BD, codes_BD), classes_B[:, None] != classes_B
        nearest = [distances_BB[row][others[row]].min() for row in range(len(codes_BD))]
        losses_B = F.cross_entropy(self.classes(codes_BD), classes_B, reduction="none")
        return torch.stack(nearest).mean() / spread + losses_B.mean() * self.scale


class Numbers(Encoder):
    """Asks how many rows there are before it encodes them, and divides by functions of that number."""

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        rows, _ = x_BF.shape
        codes_BD = F.normalize(self.encoder(x_BF), dim=1)
        alike_BB = torch.exp(-torch.cdist(codes_BD, codes_BD).square())
        pairs = (alike_BB.sum() - rows) / (rows**2 - rows)
        return self.scale * pairs.log() + math.log(rows) * codes_BD.sum() / np.sqrt(rows) + pairs / rows**0.5


class SomeOfTheRows(Encoder):
    """The largest losses count."""

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        losses_B = F.cross_entropy(self.encoder(x_BF) * self.scale, classes_B, reduction="none")
        return losses_B.topk(int(0.7 * losses_B.numel())).values.mean()


class PerClass(Encoder):
    """Divides by how many classes the batch has; at first each worker has all of them."""

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        return self.encoder(x_BF).square().sum() * self.scale / len(torch.unique(classes_B))


def trained(kind: type[Encoder], batches: list[tuple[Tensor, Tensor]], device: str) -> list[Tensor]:
    """Returns the losses and the final weights."""
    torch.manual_seed(0)
    model = kind().to(device)
    optimizer, trace = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, classes in batches:
        loss = model(x.to(device), classes.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.append(loss.detach())
    return trace + [value.detach() for value in model.state_dict().values()]


def batches_of(*rows: int) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(number, 6, generator=draws), torch.arange(number) * 3 // number) for number in rows]


@pytest.mark.parametrize("kind", [HardestInALoop, Numbers, SomeOfTheRows])
def test_losses_and_weights_are_those_of_one_device_for_any_number_of_rows(kind, capsys):
    batches = batches_of(12, 12, 17, 10)
    assert_same(*on_both(lambda device: trained(kind, batches, device)), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class PerPresentClass(Encoder):
    """The same by a mask of the classes that there are."""

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        present = F.one_hot(classes_B, 3).sum(0) > 0
        return self.encoder(x_BF).square().sum() * self.scale / present.sum()


class PerPresentLabel(Encoder):
    """The same of labels that are written as zeros and ones."""

    def forward(self, x_BF: Tensor, labels_BC: Tensor) -> Tensor:
        return self.encoder(x_BF).square().sum() * self.scale / (labels_BC.sum(0) > 0).sum()


def test_labels_that_each_worker_has_at_first_are_those_of_the_batch_later(capsys):
    (x, sorted_classes), (other, _) = batches_of(12, 12)
    batches = [(x, F.one_hot(torch.arange(12) % 3).float()), (other, F.one_hot(sorted_classes).float())]
    assert_same(*on_both(lambda device: trained(PerPresentLabel, batches, device)), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [PerClass, PerPresentClass])
def test_classes_that_each_worker_has_at_first_are_those_of_the_batch_later(kind, capsys):
    (x, sorted_classes), (other, _) = batches_of(12, 12)
    batches = [(x, torch.arange(12) % 3), (other, sorted_classes)]
    assert_same(*on_both(lambda device: trained(kind, batches, device)), rtol=1e-4, atol=1e-5)
    assert WHOLE not in capsys.readouterr().out


class NoiseAtTheEnd(HardestInALoop):
    """Draws where all rows are."""

    def forward(self, x_BF: Tensor, classes_B: Tensor) -> Tensor:
        return super().forward(x_BF, classes_B) + self.scale * F.dropout(self.classes.weight, 0.5).sum()


def test_what_draws_with_all_rows_is_computed_as_one_device_does(capsys):
    batches = batches_of(12, 12)
    assert_same(*on_both(lambda device: trained(NoiseAtTheEnd, batches, device)))
    assert WHOLE in capsys.readouterr().out
