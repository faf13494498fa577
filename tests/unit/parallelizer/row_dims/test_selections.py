"""Functions that select entries along the dim with rows."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.row_dims.selections import COUNTS_SELECTED, Selections, selects_rows


@pytest.mark.parametrize(
    ("select", "sizes"),
    [
        (lambda x: x[:, 0].topk(2), [6]),
        (lambda x: x.topk(2), []),
        (lambda x: torch.topk(x, 2, dim=0), [6]),
        (lambda x: x.topk(2, -2), [6]),
        (lambda x: x.median(), [6]),
        (lambda x: x.median(1), []),
        (lambda x: x.quantile(0.5), [6]),
        (lambda x: x.sort(0), [6]),
        (lambda x: x.argsort(dim=1), []),
        (lambda x: x.int().sort(0), []),
        (lambda x: torch.unique(x.int()), [6]),
        (lambda x: x.unique(dim=1), []),
        (lambda x: x.sum(0), []),
        (lambda x: (x > 0.5).cumsum(0), [6]),
        (lambda x: torch.cumsum((x > 0.5).float(), dim=0), [6]),
        (lambda x: (x > 0.5).cumsum(1), []),
        (lambda x: x.cumsum(0), []),
    ],
)
def test_what_selects_along_the_first_dim_is_noted(select, sizes):
    with Selections() as selections:
        select(torch.rand(6, 4))
    assert selections.sizes == sizes


def test_rows_are_selected_where_fewer_rows_are_fewer_entries():
    assert selects_rows([6], [[3], [3]]) and selects_rows([6, 5], [[6, 5], [6, 4]])
    assert not selects_rows([], [[]]) and not selects_rows([9], [[9], [9]])
    assert not selects_rows([9, 9], [[9], [9]])


@pytest.mark.parametrize(
    ("forward", "counts"),
    [
        (lambda x: len((x > 0.5).nonzero()), True),
        (lambda x: torch.where(x > 0.5)[1].numel(), True),
        (lambda x: (x > 0.5).nonzero(as_tuple=True)[0].shape[0], True),
        (lambda x: (x > 0.5).nonzero()[:, 0][:3], True),
        (lambda x: x[(x > 0.5).nonzero(as_tuple=True)[0]][:3], True),
        (lambda x: len(x[x[:, 0] > 0.5]), True),
        (lambda x: (x > 0.5).sum().item(), True),
        (lambda x: bool((x > 0.5).sum() > 3), True),
        (lambda x: (x > 0.5).any().item(), False),
        (lambda x: x.sum().item(), False),
        (lambda x: x[(x > 0.5).nonzero(as_tuple=True)[0]].sum(), False),
        (lambda x: (x > 0.5).nonzero()[:, 0].sum(), False),
        (lambda x: x[:3][x[:3] > 0.5].sum(), False),
        (lambda x: len(torch.where(x > 0.5, x, 0.0)), False),
        (lambda x: len(x), False),
    ],
)
def test_who_asks_how_many_entries_were_found_is_noted(forward, counts):
    saw: set[str] = set()
    with Selections(saw):
        forward(torch.rand(6, 4))
    assert (COUNTS_SELECTED in saw) == counts
