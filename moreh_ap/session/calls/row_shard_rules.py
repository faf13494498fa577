"""Operations on row-sharded tensors, and on large ones of which each worker has a copy.

Decides how the arguments of each worker differ from the script's for each rule of the table (`protocol.shard_rules`);
an operation without a rule, or with operands that do not fit it, is declined: then the controller reads the full
tensors and computes it. This is below autograd: the operations of a backward come here like any other. Must not know
how a worker computes on its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device import operations
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.protocol.messages.tensors import LocalNumRows
from moreh_ap.protocol.shard_rules import BatchRule, shard_rules
from moreh_ap.session.calls.row_shard_operation import Operation, like
from moreh_ap.session.calls.row_shard_values import RowShardedValue, RowShardedView

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # the values of `reduction` in ATen
_DIM_NAMES = frozenset({"dim", "dims", "dim0", "dim1"})
_HAS_ONE_DIM_MORE = {aten.unsqueeze, aten.stack}


def run_on_row_shards(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of an ATen operation with row-sharded operands; NotImplemented if it is declined."""
    operation = Operation.of(func, args, kwargs)
    if operation is None or torch.Tag.nondeterministic_seeded in func.tags:
        return NotImplemented
    if func._schema.is_mutable:
        return _in_place(operation)
    rule = shard_rules(func).batch
    return NotImplemented if rule is None else _CARRY_OUT[rule](operation)


def _divided(tensor: Tensor, by: Any) -> Tensor:
    func = aten.div.Tensor if isinstance(by, Tensor) else aten.div.Scalar
    result: Tensor = operations.run(func, (tensor, by), {})
    return result


def _dims_of(operation: Operation) -> list[int] | None:
    """Returns the dims that an operation reduces or moves, from 0 up; None if it uses all dims."""
    first = next(operation.tensors())
    num_dims = first.dim() + (operation.func.overloadpacket in _HAS_ONE_DIM_MORE)
    found: list[int] = []
    for argument in operation.func._schema.arguments:
        if argument.name not in _DIM_NAMES:
            continue
        dims = operation.argument(argument.name)
        if dims is None or dims == []:
            return None
        found += [dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)]
    return found or None


# -- rules -------------------------------------------------------------------------------------------------------------


def _elementwise(operation: Operation) -> Any:
    metas = operation.metas()
    if not isinstance(metas, Tensor) or not operation.aligned(metas.shape):
        return NotImplemented
    return operation.run(like(metas.shape))


def _in_place(operation: Operation) -> Any:
    """In-place operations such as ``scores.masked_fill_(mask, 0)``, unless the memory is a call's output."""
    func, target = operation.func, operation.args[0]
    value = target._cell.value if isinstance(target, VirtualTensor) else None
    root = value.root() if isinstance(value, RowShardedView) else value
    functional = getattr(aten, func._opname.removesuffix("_"), None)
    overload = getattr(functional, func._overloadname, None)
    is_known = overload is not None and torch.Tag.pointwise in overload.tags and func._opname.endswith("_")
    if not (is_known and isinstance(root, RowShardedValue) and operation.aligned(target.shape)):
        return NotImplemented
    operation.run_in_place(like(target.shape))
    root.changed_there()
    return target


def _along_other_dims(operation: Operation) -> Any:
    """Softmax, sorting, slices: row by row, unless the operation runs along dim 0."""
    first = next(operation.tensors())
    dims = _dims_of(operation)
    if dims is None or (operation.batch is not None and 0 in dims) or not operation.aligned(first.shape):
        return NotImplemented
    return operation.run(like(first.shape))


def _total(operation: Operation) -> Any:
    """Sums and means: along other dims row by row, over the rows as the sum of the workers' sums."""
    first, dims = operation.args[0], _dims_of(operation)
    if not operation.aligned(first.shape):
        return NotImplemented
    if operation.batch is None or (dims is not None and 0 not in dims):
        return operation.run(like(first.shape))
    if operation.func.overloadpacket is aten.sum:
        return operation.run(like(first.shape), sums=True)
    mean = operation.metas()
    func = getattr(aten.sum, "dim_IntList" if operation.func._overloadname == "dim" else "default")
    total = run_on_row_shards(func, operation.args, {**operation.kwargs, "dtype": mean.dtype})
    return _divided(total, first.numel() / mean.numel()) if mean.dtype.is_floating_point else NotImplemented


def _loss(operation: Operation) -> Any:
    """Losses that are the sum or mean of one number per element."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in operation.tensors()))
    if not operation.aligned(shape):
        return NotImplemented
    reduction = operation.argument("reduction")
    if reduction == _NONE:
        return operation.run(like(shape))
    total = operation.having(reduction=_SUM).run(like(shape), sums=True)
    return total if reduction == _SUM else _divided(total, shape.numel())


def _loss_backward(operation: Operation) -> Any:
    shape = operation.argument("self").shape
    if operation.argument("reduction") == _MEAN:
        gradient = _divided(operation.argument("grad_output"), shape.numel())
        operation = operation.having(grad_output=gradient, reduction=_SUM)
    return operation.run(like(shape)) if operation.aligned(shape) else NotImplemented


def _class_loss(operation: Operation) -> Any:
    """Negative log-likelihood: the sum of the targets' scores; for a mean, divided by the sum of their weights."""
    scores, target, reduction = operation.args[0], operation.argument("target"), operation.argument("reduction")
    if not _share_rows(operation, scores, target):
        return NotImplemented

    def follows(tensor: Tensor) -> bool:
        return tensor is scores or tensor is target

    if reduction == _NONE:
        return operation.run(follows)
    total, weight = operation.having(reduction=_SUM).run(follows, sums=True)
    return (_divided(total, weight) if reduction == _MEAN else total), weight


def _class_loss_backward(operation: Operation) -> Any:
    gradient, scores, target = (operation.argument(name) for name in ("grad_output", "self", "target"))
    if not _share_rows(operation, scores, target):
        return NotImplemented
    return operation.run(lambda tensor: any(tensor is one for one in (gradient, scores, target)))


def _share_rows(operation: Operation, scores: Tensor, target: Tensor) -> bool:
    # One row's scores alone have no dim for rows.
    return scores.dim() > 1 and target.shape[0] == scores.shape[0] and operation.counts_rows(scores.shape[0])


def _new_sizes(operation: Operation) -> Any:
    """Views and new tensors of a size, if dim 0 counts rows before and after."""
    source, result = operation.args[0], operation.metas()
    names = [argument.name for argument in operation.func._schema.arguments]
    name = "size" if "size" in names else "input_sizes"
    is_expanded = operation.func.overloadpacket is aten.expand
    if is_expanded and (result.dim() != source.dim() or result.shape[0] != source.shape[0]):
        return NotImplemented
    counts = all(tensor.dim() and operation.counts_rows(tensor.shape[0]) for tensor in (source, result))
    if not counts or 0 in result.shape or (operation.batch is not None and 0 in (_dims_of(operation) or ())):
        return NotImplemented
    sizes = [LocalNumRows(result.shape[0]), *result.shape[1:]]
    sent = operation.having(**{name: sizes})
    # The full tensor may be viewable where a row shard is not, since its strides differ.
    packet = aten.reshape if operation.func.overloadpacket in (aten.view, aten._unsafe_view) else None
    return operation.run(lambda tensor: tensor is source, sent=(sent.args, sent.kwargs), packet=packet)


def _permuted(operation: Operation) -> Any:
    dims = [dim % operation.args[0].dim() for dim in operation.argument("dims")]
    if operation.batch is not None and dims[0] != 0:
        return NotImplemented
    return operation.run(lambda tensor: True)


def _copied(operation: Operation) -> Any:
    """Changes of dtype or memory format."""
    return operation.run(lambda tensor: True)


_CARRY_OUT: dict[BatchRule, Callable[[Operation], Any]] = {
    BatchRule.POINTWISE: _elementwise,
    BatchRule.OTHER_DIMS: _along_other_dims,
    BatchRule.TOTAL: _total,
    BatchRule.LOSS: _loss,
    BatchRule.LOSS_BACKWARD: _loss_backward,
    BatchRule.CLASS_LOSS: _class_loss,
    BatchRule.CLASS_LOSS_BACKWARD: _class_loss_backward,
    BatchRule.NEW_SIZES: _new_sizes,
    BatchRule.PERMUTED: _permuted,
    BatchRule.COPIED: _copied,
}
