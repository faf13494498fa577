"""Lists of Python with an entry for each row: lengths, texts; and lists that only have as many entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_one_line_training import assert_same, on_both
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

pytestmark = [pytest.mark.rotating, pytest.mark.timeout(120)]


class Captions(nn.Module):
    """Reads (B, T) words up to the length of each row, and the first letter of each row's text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.letters = nn.Embedding(20, 8), nn.Embedding(30, 8)
        self.reader, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(16, 3)

    def forward(self, words_BT: Tensor, lengths: list[int], texts: list[str]) -> Tensor:
        packed = pack_padded_sequence(self.words(words_BT), lengths, batch_first=True, enforce_sorted=False)
        letters = torch.tensor([ord(text[0]) - ord("a") for text in texts], device=words_BT.device)
        return self.head(torch.cat([self.reader(packed)[1][-1], self.letters(letters)], dim=1))


class Pooled(nn.Module):
    """Pools (B, C, 4, 4) pictures; the size of a kernel has as many entries as a batch of two has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)

    def forward(self, images_BCHW: Tensor, size: tuple[int, int]) -> Tensor:
        return self.head(F.max_pool2d(images_BCHW, size).flatten(1))


def captions(rows: int) -> tuple[Any, ...]:
    """Returns words, a length and a text for each row."""
    lengths = torch.randint(2, 6, (rows,)).tolist()
    return torch.randint(0, 20, (rows, 5)), lengths, ["abcdef"[length] + "x" * length for length in lengths]


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_lists_are_cut_with_the_rows(
    accelerator: Callable[..., Any], plan: str, capfd: pytest.CaptureFixture[str]
) -> None:
    accelerator(plan, strict=True)

    def train(device: str) -> list[Any]:
        torch.manual_seed(0)
        losses = []
        for model, batches in (
            (Captions().to(device), [captions(rows) for rows in (6, 6, 7)]),
            (Pooled().to(device), [(torch.rand(2, 3, 4, 4), (2, 2))] * 2),
        ):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for first, *others in batches:
                logits_BK = model(first.to(device), *others)
                loss = F.cross_entropy(logits_BK, torch.arange(len(first), device=device) % 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            losses += [parameter.detach().cpu() for parameter in model.parameters()]
        return losses

    assert_same(*on_both(train))
    assert "whole batch" not in capfd.readouterr().out
