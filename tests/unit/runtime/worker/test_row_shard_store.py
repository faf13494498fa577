"""Operations on row shards that are held in another precision than promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.tensors import OutputRef, RowShardRef
from moreh_ap.runtime.worker.row_shard_store import RowShard, convert_memory_of, run_on_row_shards

LOGITS = OutputRef(0, 0)


class Store:
    """The row shards of one worker; `LOGITS` are held in bfloat16."""

    def __init__(self, values: torch.Tensor) -> None:
        self.logits = RowShard(values.bfloat16(), Axis(0, 1, None), len(values), True, torch.float32)
        self.shards: dict[int, RowShard] = {}

    def run(self, name: str, first: Any, *rest: Any, output: int | None = None) -> RowShard | None:
        outputs = () if output is None else (output,)
        command = RunOnRowShards(name, (first, *rest), {}, outputs, sums=False)
        results = run_on_row_shards(command, self._find, lambda data: data.tensor(), self._convert)
        assert results is not None
        if output is not None:
            self.shards[output] = results[0]
        return results[0] if results else None

    def _find(self, ref: Any) -> RowShard:
        return self.logits if isinstance(ref, OutputRef) else self.shards[ref.number]

    def _convert(self, shard: RowShard) -> None:
        convert_memory_of(shard, self.shards.values())


@pytest.fixture
def store() -> Store:
    torch.manual_seed(0)
    return Store(torch.randn(4, 6))


@pytest.mark.parametrize("name, rest", [
    ("aten::view.default", ([2, 12],)),
    ("aten::reshape.default", ([24],)),
    ("aten::transpose.int", (0, 1)),
    ("aten::slice.Tensor", (1, 0, 3)),
    ("aten::clone.default", ()),
])  # fmt: skip
def test_what_moves_values_leaves_their_precision(store, name, rest):
    result = store.run(name, LOGITS, *rest, output=1)
    assert (result.held.dtype, result.promised, result.tensor.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    reply = result.reply()
    assert reply.dtype == torch.float32
    assert torch.equal(reply.tensor(), result.held.float())


def test_what_computes_gets_what_was_promised(store):
    found = store.run("aten::_log_softmax.default", LOGITS, 1, False, output=1)
    assert found.held.dtype == found.promised == torch.float32
    assert torch.equal(found.held, store.logits.held.float().log_softmax(1))
    seen = store.run("aten::view.dtype", LOGITS, torch.int32, output=2)
    assert seen.held.shape == (4, 6) and seen.held.dtype == seen.promised == torch.int32


def test_a_change_in_place_is_seen_through_all_views_and_loses_no_precision(store):
    copied = store.run("aten::clone.default", LOGITS, output=1)
    view = store.run("aten::slice.Tensor", RowShardRef(1), 1, 2, 5, output=2)
    before = copied.held.float()
    store.run("aten::mul_.Tensor", RowShardRef(2), 1.001)
    expected = before.clone()
    expected[:, 2:5] *= 1.001
    assert torch.equal(copied.tensor, expected) and torch.equal(view.tensor, expected[:, 2:5])
    store.run("aten::add_.Tensor", RowShardRef(1), 1.0)
    assert torch.equal(view.tensor, (expected + 1.0)[:, 2:5])
    assert store.logits.held.dtype == torch.bfloat16


def test_a_dim_may_have_an_entry_for_several_rows():
    shard = RowShard(torch.zeros(1, 3), Axis(0, 2, None), 8, True, torch.float32)
    assert shard.local_size(2) == 1, "one of each four rows"
    assert shard.local_size(24) == 12, "three of each row"
