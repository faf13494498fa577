"""Which ATen operations run on shards, and by which rule: one table for batch slices, state tensors and activations.

Decides nothing about how a rule is carried out: batch slices are `session.calls.row_shard_rules`, state tensors
`session.state_tensors`, activations under tensor parallelism `parallelizer.tensor.split_tensor`. An operation that the
table does not have gets whole tensors. Operations that PyTorch tags as pointwise need no row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

aten = torch.ops.aten


class BatchRule(enum.Enum):
    """On tensors of which each worker has its rows of the batch, in dim 0."""

    POINTWISE = "row by row, operands broadcast"
    OTHER_DIMS = "row by row, unless dim 0 is one of those that it works along"
    TOTAL = "along dim 0 a sum over the workers, along others row by row"
    LOSS = "a sum of one number an element, divided by their number for the mean"
    LOSS_BACKWARD = "row by row, the given gradient divided by the number of elements for the mean"
    CLASS_LOSS = "a sum of one number a target, divided by the sum of their weights for the mean"
    CLASS_LOSS_BACKWARD = "row by row, with all the weights"
    NEW_SIZES = "row by row with sizes of the rows here, if dim 0 counts rows before and after"
    PERMUTED = "row by row, if dim 0 stays the first"
    COPIED = "row by row, whatever the shape"


class StateRule(enum.Enum):
    """On parameters, gradients and optimizer state, of which each worker has the shards of its plan."""

    IN_PLACE_OF_OPERAND = "the result lies as the operand does"
    COMBINED = "a reduction, or a new arrangement: only where every worker has its shard alike"
    CHECKED = "gradients are changed in place; one number, the largest of all workers', says what was found in them"


class ActivationRule(enum.Enum):
    """On activations of which each rank of a tensor-parallel group has a shard along one dim."""

    POINTWISE = "on the shards, with the matching slice of every other operand"
    SAME_DIM = "on the shards, split along the same dim"
    VIEW = "on the shards, if one dim of the result is the split one"
    SLICE = "on the shards, unless it cuts the split dim"
    SELECT = "on the shards, unless it selects from the split dim"
    CAT = "on the shards, unless it joins along the split dim"
    UNSQUEEZE = "on the shards, the split dim counted anew"
    TRANSPOSE = "on the shards, the split dim where it went"
    CUT_BACKWARD = "on the shards, unless the cut went through the split dim"


@dataclass(frozen=True)
class ShardRules:
    """The row of an operation: its rule for each kind of shards, None where it gets whole tensors."""

    batch: BatchRule | None = None
    state: StateRule | None = None
    activation: ActivationRule | None = None


def shard_rules(func: Any) -> ShardRules:
    """The row of an ATen operation, by an overload of it."""
    if func is aten.view.dtype:  # it changes how many elements a dim has
        return _NONE
    found, is_pointwise = _TABLE.get(func.overloadpacket), torch.Tag.pointwise in func.tags
    if torch.Tag.data_dependent_output in func.tags:  # torch.equal is tagged as pointwise, and gives one bool
        return _NONE
    if found is not None and not (found is _BY_ROW and is_pointwise):  # torch.max of two tensors is pointwise
        return found
    if func._opname.startswith(_FOREACH):
        is_reduction = func._opname.removeprefix(_FOREACH) in ("norm", "max", "powsum")
        return ShardRules(state=StateRule.COMBINED if is_reduction else StateRule.IN_PLACE_OF_OPERAND)
    return _POINTWISE if is_pointwise else _NONE


_FOREACH = "_foreach_"
_NONE = ShardRules()
_POINTWISE = ShardRules(BatchRule.POINTWISE, StateRule.IN_PLACE_OF_OPERAND, ActivationRule.POINTWISE)

_IN_PLACE, _COMBINED = StateRule.IN_PLACE_OF_OPERAND, StateRule.COMBINED


def _table(*entries: tuple[ShardRules, Iterable[Any]]) -> dict[Any, ShardRules]:
    return {packet: row for row, packets in entries for packet in packets}


_BY_ROW = ShardRules(BatchRule.OTHER_DIMS)
_COPY = ShardRules(BatchRule.COPIED, _IN_PLACE)
_SIZES = ShardRules(BatchRule.NEW_SIZES)

_TABLE = _table(
    (_COPY, [aten.zeros_like, aten.ones_like, aten.empty_like]),
    (replace(_COPY, activation=ActivationRule.SAME_DIM), [aten.clone, aten._to_copy]),
    (replace(_COPY, state=None), [aten.full_like]),
    (ShardRules(activation=ActivationRule.SAME_DIM), [aten.detach, aten.alias]),
    (ShardRules(state=_IN_PLACE), [aten.zero_, aten.fill_, aten.copy_]),
    (ShardRules(BatchRule.TOTAL, _COMBINED), [aten.sum, aten.mean]),
    (replace(_BY_ROW, state=_COMBINED), [aten.linalg_vector_norm, aten.stack]),
    (
        _BY_ROW,
        [
            *(aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data),
            *(aten.logsumexp, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.topk, aten.sort),
            *(aten.var, aten.std, aten.any, aten.all, aten.prod, aten.cumsum, aten.cumprod, aten.logcumsumexp),
            *(aten.gather, aten.scatter, aten.scatter_add, aten.flip, aten.roll),
            *(aten.squeeze, aten.unbind, aten.split, aten.split_with_sizes),
        ],
    ),
    (replace(_BY_ROW, activation=ActivationRule.CAT), [aten.cat]),
    (replace(_BY_ROW, activation=ActivationRule.SLICE), [aten.slice]),
    (replace(_BY_ROW, activation=ActivationRule.SELECT), [aten.select]),
    (replace(_BY_ROW, activation=ActivationRule.UNSQUEEZE), [aten.unsqueeze]),
    (replace(_BY_ROW, activation=ActivationRule.TRANSPOSE), [aten.transpose]),
    (
        ShardRules(BatchRule.LOSS),
        [
            *(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss),
            *(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits),
        ],
    ),
    (
        ShardRules(BatchRule.LOSS_BACKWARD),
        [
            *(aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward),
            *(aten.soft_margin_loss_backward, aten.binary_cross_entropy_backward),
        ],
    ),
    (ShardRules(BatchRule.CLASS_LOSS), [aten.nll_loss_forward, aten.nll_loss2d_forward]),
    (ShardRules(BatchRule.CLASS_LOSS_BACKWARD), [aten.nll_loss_backward, aten.nll_loss2d_backward]),
    (replace(_SIZES, activation=ActivationRule.VIEW), [aten.view, aten._unsafe_view]),
    (replace(_SIZES, activation=ActivationRule.CUT_BACKWARD), [aten.slice_backward, aten.select_backward]),
    (_SIZES, [aten.expand, aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full]),
    (ShardRules(BatchRule.PERMUTED), [aten.permute]),
    (ShardRules(state=StateRule.CHECKED), [aten._amp_foreach_non_finite_check_and_unscale_]),
)
