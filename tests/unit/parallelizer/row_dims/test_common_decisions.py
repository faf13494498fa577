"""What a forward decides by for all rows, and what it would find beside others."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.row_dims.common_decisions import BesideOthers, of_several_rows
from moreh_ap.parallelizer.row_dims.read_numbers import ReadNumbers

X = torch.tensor([[1.0, 2.0], [3.0, 4.0], [2.0, 1.0]])


def decisions(forward) -> frozenset[int]:
    noted = [ReadNumbers() for _ in range(3)]
    for mode, rows in zip(noted, (X[:2], X[:1], X[1:2])):
        with mode:
            forward(rows)
    together, *apart = (mode.decisions for mode in noted)
    return of_several_rows(together, apart)


@pytest.mark.parametrize(
    ("forward", "which"),
    [
        (lambda x: (x > 5).any(), {0}),
        (lambda x: (x > 5).any(dim=0), {0}),
        (lambda x: x.max(), {0}),
        (lambda x: 7.0 in x, {0}),
        (lambda x: (x > 5).nonzero().numel(), {0}),
        (lambda x: (x > 5).any(dim=1), set()),  # a decision for each row
        (lambda x: x.max(1).values.max(0).values, {1}),
        (lambda x: x.long().max(), set()),  # a length
        (lambda x: x * torch.ones(3).max(), set()),  # of no row
    ],
)
def test_which_decisions_are_found_among_several_rows(forward, which):
    assert decisions(forward) == which


@pytest.mark.parametrize(
    ("forward", "beside"),
    [
        (lambda x: bool((x > 5).any()), True),
        (lambda x: bool((x < 5).all()), False),
        (lambda x: bool(x.max() > 5), True),
        (lambda x: bool(x.min() < -5), True),
        (lambda x: x.max().item() > 1000, True),
        (lambda x: float(x.max() * 2) > 1000, True),
        (lambda x: float(x.max()) > 1000, True),
        (lambda x: 7.0 in x, True),
        (lambda x: len((x > 5).nonzero()), 1),
        (lambda x: (x > 5).nonzero().shape[0], 1),
        (lambda x: float((x - x.max()).exp()[0, 0]), pytest.approx(float((X - X.max()).exp()[0, 0]))),  # no decision
    ],
)
def test_what_is_found_beside_other_rows(forward, beside):
    with BesideOthers(frozenset({0})):
        found = forward(X)
    assert found == beside


def test_other_decisions_are_as_they_are():
    with BesideOthers(frozenset({1})):
        assert not bool((X > 5).any())
        assert bool((X > 5).any())
