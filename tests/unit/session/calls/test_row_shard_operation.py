"""Results of operations on row shards, as the script's process knows them: shapes, strides and dtypes."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.session.calls import row_shard_operation
from moreh_ap.session.calls.row_shard_operation import Operation

aten = torch.ops.aten


def operation(func, *args, **kwargs):
    return Operation(func, args, kwargs, session=None, located={}, batch=None)


def made(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


@pytest.fixture
def runs(monkeypatch):
    """The operations that ran on meta."""
    found = []
    run = Operation._run_on_meta
    monkeypatch.setattr(Operation, "_run_on_meta", lambda self: found.append(self.func) or run(self))
    monkeypatch.setattr(row_shard_operation, "_known_results", {})
    return found


LOSS = aten.nll_loss_forward.default


def of_loss(rows, reduction=1, dtype=torch.float32):
    return operation(LOSS, made(rows, 5, dtype=dtype), made(rows, dtype=torch.int64), None, reduction, -100)


def test_the_second_time_an_operation_is_known_by_its_operands(runs):
    first, second = of_loss(4).metas(), of_loss(4).metas()
    assert runs == [LOSS]
    assert all(one is not other and one.is_meta for one, other in zip(first, second, strict=True))
    assert [(one.shape, one.stride(), one.dtype) for one in first] == [
        (one.shape, one.stride(), one.dtype) for one in second
    ]


@pytest.mark.parametrize("other", [of_loss(6), of_loss(4, 0), of_loss(4, 1, torch.float64)])
def test_others_run(runs, other):
    of_loss(4).metas()
    found, wanted = other.metas(), other._run_on_meta()
    assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in wanted]
    assert len(runs) == 3


def test_a_number_is_told_from_a_truth_value_and_from_a_float(runs):
    dtypes = [operation(aten.add.Tensor, made(2, dtype=torch.int64), x).metas().dtype for x in (1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64] and len(runs) == 3


def test_strides_count_and_stay(runs):
    x = made(3, 4).t()
    for _ in range(2):
        assert operation(aten.relu.default, x).metas().stride() == (1, 4)
    assert operation(aten.relu.default, made(4, 3)).metas().stride() == (3, 1)
    assert len(runs) == 2


def test_views_and_operands_that_nothing_tells_apart_run_each_time(runs):
    for _ in range(2):
        operation(aten.t.default, made(2, 3)).metas()
        operation(aten.add.Tensor, made(2, 3), 1j).metas()
    assert len(runs) == 4


def test_what_is_known_stays_bounded(runs, monkeypatch):
    monkeypatch.setattr(row_shard_operation, "_MOST_KNOWN", 2)
    for rows in (1, 2, 3, 4):
        of_loss(rows).metas()
    assert len(row_shard_operation._known_results) == 2
