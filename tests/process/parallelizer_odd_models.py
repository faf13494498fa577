"""Models whose batch cannot be cut, each for another reason, and some that only look so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNormalised(nn.Module):
    """Statistics over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.head = nn.Linear(9, 6), nn.BatchNorm1d(6), nn.Linear(6, 7)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> loss"""
        return (F.cross_entropy(self.head(self.norm(self.inlet(x))), labels),)


class Contrastive(nn.Module):
    """Every row is compared with every other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(9, 6), nn.Linear(9, 6)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> loss"""
        scores = self.left(x) @ self.right(x).T
        return (F.cross_entropy(scores, torch.arange(len(x))),)


class TimeFirst(nn.Module):
    """Dim 0 is time, not rows."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.LSTM(9, 6)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[time, 9], [time] -> loss"""
        hidden, _ = self.memory(x.unsqueeze(1))
        return (F.cross_entropy(hidden.squeeze(1), labels.clamp(max=5)),)


class Penalised(nn.Module):
    """A penalty on the weights is part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> loss"""
        return (F.cross_entropy(self.head(x), labels) + 0.01 * self.head.weight.square().sum(),)


class HiddenCoupling(nn.Module):
    """The result is row by row, but the gradient is scaled by a number of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> [rows, 7]"""
        out = self.head(x)
        strength = out.detach().abs().sum()
        return (out.detach() + strength * (out - out.detach()),)


class RowNumberReturned(nn.Module):
    """Tells how many rows it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor | int, ...]:
        """[rows, 9], [rows] -> loss, number"""
        return F.cross_entropy(self.head(x), labels), len(x)


class Splittable(nn.Module):
    """Dropout, a mean over the batch, an output without rows, and tensors made on "cuda": all of this can be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.drop = nn.Linear(9, 7), nn.Dropout(0.5)
        self.temperature = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor | str]:
        """[rows, 9], [rows] -> loss, logits, temperature, name"""
        print("noise on the terminal")
        offset = torch.ones(7, device="cuda") + torch.zeros(7).to("cuda:0").cuda()
        logits = self.drop(self.head(x)) / self.temperature + offset
        loss = F.mse_loss(logits.sum(1), labels.float()) + logits.mean(0).sum()
        return {"loss": loss, "logits": logits, "temperature": self.temperature * 1, "name": "splittable"}


class Triplets(nn.Module):
    """A row is compared with one of its own class and one of another: for any two rows that gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 7)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> loss"""
        out = self.head(x)
        return (F.cross_entropy(out, labels) + self.triplet_loss(out, labels),)

    def triplet_loss(self, out: Tensor, labels: Tensor) -> Tensor:
        distances = (out.unsqueeze(0) - out.unsqueeze(1)).square().sum(-1)
        alike = labels.unsqueeze(0) == labels.unsqueeze(1)
        positive = alike & ~torch.eye(len(out), dtype=torch.bool)
        valid = positive.unsqueeze(2) & ~alike.unsqueeze(1)
        return F.relu(distances.unsqueeze(2) - distances.unsqueeze(1) + 1)[valid].sum() / 8


class NothingButZero(Triplets):
    """Classes are hidden, so that a few rows give a loss of zero, whether they look at each other or not."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """[rows, 9], [rows] -> loss"""
        out = self.head(x)
        return (self.triplet_loss(out, torch.arange(len(out)) // 4),)


REFUSED = [
    BatchNormalised,
    Contrastive,
    TimeFirst,
    Penalised,
    HiddenCoupling,
    RowNumberReturned,
    Triplets,
    NothingButZero,
]
