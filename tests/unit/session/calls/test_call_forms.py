"""What the controller says of a call's tensors before it sends them."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.session.calls.call_forms import form_of, have_uneven_pictures

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
    assert have_uneven_pictures(tensors) is uneven and have_uneven_pictures(tensors[::-1]) is uneven


def test_other_calls_are_not_looked_at():
    assert not have_uneven_pictures([torch.zeros(3, 3, 4, 4), torch.zeros(3, 4)])
    assert not have_uneven_pictures([words([2, 0, 1]), torch.zeros(4, 3, 4, 4)]), "no tensor looks like rows"


def test_a_form_is_shape_dtype_and_order():
    pictures = torch.zeros(2, 3, 4, 5)
    assert form_of(pictures) == form_of(torch.ones(2, 3, 4, 5)) != form_of(pictures.double())
    assert form_of(pictures) != form_of(pictures.to(memory_format=torch.channels_last))
