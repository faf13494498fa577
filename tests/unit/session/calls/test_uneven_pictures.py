"""What the controller says of a call's tensors before it sends them."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.session.calls.uneven_pictures import are_no_rows

PICTURE = 99


def words(counts: list[int]) -> torch.Tensor:
    ids = torch.arange(12 * len(counts)).view(-1, 12) + 100
    for row, count in zip(ids, counts):
        row[1 : 1 + 3 * count] = PICTURE
    return ids


@pytest.mark.parametrize(
    ("counts", "uneven"), [([1, 1, 1], False), ([2, 0, 1], True), ([0, 1, 2], True), ([0, 0, 0], False)]
)
def test_as_many_pictures_as_rows(counts, uneven):
    tensors = [words(counts), torch.zeros(3, 3, 4, 4)]
    assert are_no_rows(tensors) is uneven and are_no_rows(tensors[::-1]) is uneven


def test_other_calls_are_not_looked_at():
    assert not are_no_rows([torch.zeros(3, 3, 4, 4), torch.zeros(3, 4)])
    assert not are_no_rows([words([2, 0, 1]), torch.zeros(4, 3, 4, 4)]), "no tensor looks like rows"
