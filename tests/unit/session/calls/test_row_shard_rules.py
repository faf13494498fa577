"""What workers are told to run on their rows of large tensors, and which operations are declined."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import moreh_ap.device.function_mode  # noqa: F401  (gives tensors of the accelerator their functions)
from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.tensors import LocalNumRows, LocalRowsOf, RowShardRef
from moreh_ap.session.calls.row_shard_rules import run_on_row_shards
from moreh_ap.session.calls.row_shard_values import RowShardedValue

aten = torch.ops.aten
BATCH = BatchRows((3, 5))
WIDTH = 2048


class Outbox:
    """Notes what it is told; nothing is ever answered."""

    def __init__(self) -> None:
        self.told: list[RunOnRowShards] = []
        self.number = 100

    def new_id(self) -> int:
        self.number += 1
        return self.number

    def post_soon(self, command: RunOnRowShards) -> SimpleNamespace:
        self.told.append(command)
        return SimpleNamespace(done=lambda: False)

    def release(self, command: object) -> None:
        pass


@pytest.fixture
def session():
    extensions = SimpleNamespace(run_on_row_shards=run_on_row_shards)
    return SimpleNamespace(outbox=Outbox(), extensions=extensions)


def parts(session, *shape: int, batch: BatchRows | None = BATCH, number: int = 7) -> VirtualTensor:
    """A large tensor of which workers have rows, 3 and 5, under a number."""
    meta = torch.empty(shape, device="meta")
    value = RowShardedValue(session, RowShardRef(number), batch, 4 * meta.numel())
    return VirtualTensor(Cell(value, ACCELERATOR), meta)


def batch_of(tensor: VirtualTensor) -> BatchRows | None:
    return tensor._cell.value.located().batch


def run(session, func, *args, **kwargs):
    """The result, and the one command that workers were told."""
    result = run_on_row_shards(func, args, kwargs)
    assert result is NotImplemented or len(session.outbox.told) == 1
    return result, session.outbox.told[-1] if session.outbox.told else None


def test_elementwise_operations_run_on_the_rows_and_small_operands_travel(session):
    scores = parts(session, 8, WIDTH)
    result, told = run(session, aten.mul.Tensor, scores, torch.ones(WIDTH))
    assert told.func == "mul.Tensor" and not told.sums
    first, second = told.arguments
    assert first == RowShardRef(7) and not isinstance(second, LocalRowsOf), "a row for all is no row of the batch"
    assert result.shape == (8, WIDTH) and batch_of(result) == BATCH


def test_of_an_operand_with_as_many_rows_each_worker_takes_its_own(session):
    _, told = run(session, aten.mul.Tensor, parts(session, 8, WIDTH), torch.ones(8, 1))
    assert isinstance(told.arguments[1], LocalRowsOf)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.softmax.int, (0,)),
        (aten._softmax.default, (0, False)),
        (aten.mm.default, (torch.ones(WIDTH, 1),)),
        (aten.native_dropout.default, (0.5, True)),
        (aten.permute.default, ([1, 0],)),
        (aten.t.default, ()),
    ],
    ids=str,
)
def test_what_needs_rows_of_others_or_has_no_rule_is_declined(session, func, args):
    result, told = run(session, func, parts(session, 8, WIDTH), *args)
    assert result is NotImplemented and told is None


def test_a_whole_operand_of_more_bytes_than_the_parts_is_declined(session):
    result, _ = run(session, aten.mul.Tensor, parts(session, 8, WIDTH), torch.ones(8, WIDTH, dtype=torch.float64))
    assert result is NotImplemented


def test_tensors_whose_rows_are_dealt_otherwise_are_not_combined(session):
    other = parts(session, 8, WIDTH, batch=BatchRows((4, 4)), number=8)
    result, _ = run(session, aten.add.Tensor, parts(session, 8, WIDTH), other)
    assert result is NotImplemented


def test_rows_that_are_not_dim_0_of_the_result_are_declined(session):
    result, _ = run(session, aten.mul.Tensor, parts(session, 8, WIDTH), torch.ones(2, 1, 1))
    assert result is NotImplemented


def test_softmax_along_another_dim_is_every_row_s_own(session):
    result, told = run(session, aten._softmax.default, parts(session, 8, WIDTH), -1, False)
    assert tuple(told.arguments) == (RowShardRef(7), -1, False)
    assert batch_of(result) == BATCH


@pytest.mark.parametrize(
    ("dims", "sums", "shape"), [([1], False, (8,)), ([0], True, (WIDTH,)), (None, True, ()), ([-2], True, (WIDTH,))]
)
def test_sums_over_the_rows_are_sums_of_the_workers_sums(session, dims, sums, shape):
    result, told = run(session, aten.sum.dim_IntList, parts(session, 8, WIDTH), dims)
    assert told.sums is sums and result.shape == shape
    assert batch_of(result) == (None if sums else BATCH)


def test_a_mean_over_the_rows_is_their_sum_divided_by_all(session):
    run_on_row_shards(aten.mean.default, (parts(session, 8, WIDTH),), {})
    total, division = session.outbox.told if len(session.outbox.told) == 2 else (*session.outbox.told, None)
    assert total.func == "sum.default" and total.sums
    assert division is None or division.func.startswith("div")


@pytest.mark.parametrize(("reduction", "sent", "sums"), [(0, 0, False), (2, 2, True), (1, 2, True)])
def test_a_loss_over_the_rows_is_summed_whatever_the_script_reduces_by(session, reduction, sent, sums):
    scores, target = parts(session, 8, WIDTH), torch.zeros(8, dtype=torch.long)
    run_on_row_shards(aten.nll_loss_forward.default, (scores, target, None, reduction, -100), {})
    told = session.outbox.told[0]
    assert told.func == "nll_loss_forward.default" and told.sums is sums
    assert told.arguments[3] == sent and isinstance(told.arguments[1], LocalRowsOf)


def test_views_count_rows_on_each_worker(session):
    result, told = run(session, aten.view.default, parts(session, 8, WIDTH), [16, WIDTH // 2])
    assert told.func == "reshape.default" and list(told.arguments[1]) == [LocalNumRows(16), WIDTH // 2]
    assert result.shape == (16, WIDTH // 2)


def test_a_view_in_which_dim_0_counts_no_rows_is_declined(session):
    result, _ = run(session, aten.view.default, parts(session, 8, WIDTH), [4, 2 * WIDTH])
    assert result is NotImplemented


def test_operations_in_place_change_what_workers_hold(session):
    scores = parts(session, 8, WIDTH)
    result, told = run(session, aten.mul_.Tensor, scores, 2.0)
    assert result is scores and told.func == "mul_.Tensor" and told.outputs == ()


def test_small_tensors_that_are_whole_on_every_worker_are_computed_here(session):
    result, told = run(session, aten.mul.Tensor, parts(session, 8, batch=None), 2.0)
    assert result is NotImplemented and told is None
    result, told = run(session, aten.mul.Tensor, parts(session, 8, WIDTH, batch=None), 2.0)
    assert batch_of(result) is None and not told.sums
