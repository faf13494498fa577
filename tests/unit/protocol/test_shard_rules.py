"""The table of operations on shards: each row is an operation of this PyTorch, each rule is carried out somewhere."""

from __future__ import annotations

import pytest
import torch

from moreh_ap.parallelizer.tensor import split_tensor
from moreh_ap.protocol import shard_rules as table
from moreh_ap.protocol.shard_rules import ActivationRule, BatchRule, ShardRules, StateRule, shard_rules
from moreh_ap.session.calls import row_shard_rules

aten = torch.ops.aten


def test_every_rule_is_carried_out_and_used() -> None:
    assert set(row_shard_rules._CARRY_OUT) == set(BatchRule)
    assert set(split_tensor._CARRY_OUT) == set(ActivationRule)
    rows = [*table._TABLE.values(), table._POINTWISE]
    assert {row.batch for row in rows} == {None, *BatchRule}
    assert {row.state for row in rows} == {None, *StateRule}
    assert {row.activation for row in rows} == {None, *ActivationRule}


@pytest.mark.parametrize(
    ("func", "expected"),
    [
        (aten.mul.Tensor, ShardRules(BatchRule.POINTWISE, StateRule.IN_PLACE_OF_OPERAND, ActivationRule.POINTWISE)),
        (aten.maximum.default, shard_rules(aten.mul.Tensor)),
        (aten.max.other, shard_rules(aten.mul.Tensor)),
        (aten.max.dim, ShardRules(BatchRule.OTHER_DIMS)),
        (aten.sum.dim_IntList, ShardRules(BatchRule.TOTAL, StateRule.COMBINED)),
        (aten._foreach_mul_.Scalar, ShardRules(state=StateRule.IN_PLACE_OF_OPERAND)),
        (aten._foreach_norm.Scalar, ShardRules(state=StateRule.COMBINED)),
        (aten.view.default, ShardRules(BatchRule.NEW_SIZES, None, ActivationRule.VIEW)),
        (aten.view.dtype, ShardRules()),
        (aten.mm.default, ShardRules()),
        (aten.equal.default, ShardRules()),
        (aten.native_dropout.default, ShardRules()),
    ],
    ids=str,
)
def test_the_row_of_an_operation(func: torch._ops.OpOverload, expected: ShardRules) -> None:
    assert shard_rules(func) == expected


@pytest.mark.parametrize("func", [aten.clone.default, aten.zeros_like.default, aten._to_copy.default])
def test_copies_lie_where_their_operand_does(func: torch._ops.OpOverload) -> None:
    row = shard_rules(func)
    assert (row.batch, row.state) == (BatchRule.COPIED, StateRule.IN_PLACE_OF_OPERAND)
