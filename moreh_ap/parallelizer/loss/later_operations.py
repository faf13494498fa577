"""A script's loss over many classes, computed a few rows at a time: which of its operations wait for that.

Decides which ATen operations go on with values that are not computed yet (`later_values.py`), and which reduce them, a
few rows at a time. Must not know how a worker came by the operands, or which rows of the batch they are.

[Note: the same operations]
A loss that a script computes from logits, ``F.cross_entropy(logits.view(-1, classes), labels.view(-1))``, is four
operations: `_log_softmax`, `nll_loss_forward` and their two backwards. Three of the four results are as large as the
logits, in float32. Here they are `LaterValues`. The two results that matter, the loss and the gradient of the logits,
are computed by the same four operations on a chunk of rows, so each number is the one that PyTorch computes; only the
order in which the rows' losses are added differs. So it is with what a script does to the logits before, as long as
each number depends on one row: ``logits / 2``, ``30 * tanh(logits / 30)``. What is needed twice is computed twice, once
in the backward, which costs less than reading whole copies from memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.parallelizer.loss.chunked_cross_entropy import LEAST_CLASSES, LEAST_ELEMENTS, are_many
from moreh_ap.parallelizer.loss.later_values import Computed, Held, InRows, LaterValues, Moved, MovedRows, Zeros

aten = torch.ops.aten

_NONE, _SUM = 0, 2  # as `torch.nn._reduction` numbers them
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOVES = {aten.reshape, aten._unsafe_view, aten.clone, aten.slice_backward, aten.select_backward}
"""Operations beside views that put the values of their operand elsewhere, in any precision."""
_KEEP_ORDER = {aten.reshape, aten.view, aten._unsafe_view, aten.clone, aten.alias, aten.detach, aten.unsqueeze}
"""Moves that leave rows in their order, where these stay whole."""
_ALONG_CLASSES = {
    *(aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default, aten.amax.default, aten.amin.default),
    *(aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim),
}
_DEEPEST = 32
"""How many operations may wait for each other; the next one computes all values."""


def moves_values(func: Any) -> bool:
    """Says whether the result of an ATen operation has the values of its operand, at other places."""
    return (func.is_view or func.overloadpacket in _MOVES) and func is not aten.view.dtype


def only_widens(func: Any, scores: Tensor, promised: torch.dtype, keyword_arguments: dict[str, Any]) -> bool:
    """Says whether an operation converts many numbers to float32 and does nothing else with them."""
    if func is not aten._to_copy.default or scores.dtype != promised or promised not in _LOW_PRECISION:
        return False
    given = {name: value for name, value in keyword_arguments.items() if value is not None}
    is_plain = given.pop("memory_format", torch.preserve_format) == torch.preserve_format
    given.pop("non_blocking", None)
    return is_plain and given == {"dtype": torch.float32} and are_many(scores)


def held(tensor: Tensor, promised: torch.dtype) -> Tensor | Held:
    """Returns a tensor in the promised dtype, which rows of a vocabulary in float32 get a few at a time."""
    if promised == torch.float32 and tensor.is_floating_point() and _is_wide(tensor.shape, tensor.device):
        return Held(tensor, promised)
    return tensor.to(promised)


def in_full(value: Any) -> Any:
    """Returns the values of `LaterValues` in their dtype, anything else as it is."""
    return value.values(value.dtype) if isinstance(value, LaterValues) else value


def run_on_later_values(func: Any, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> Any:
    """Returns the result of an operation whose operands may be `LaterValues`.

    Operations other than those in [Note: the same operations] get their values in full.
    """
    result = _continued(func, arguments, keyword_arguments)
    if result is not None:
        return result
    arguments, keyword_arguments = tree_map(in_full, (arguments, keyword_arguments))
    return func(*arguments, **keyword_arguments)


def _continued(func: Any, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> Any:
    """Returns what goes on without all values; None if they are needed."""
    if func is aten.new_zeros.default:
        return _zeros(*arguments, **keyword_arguments)
    is_later = any(isinstance(one, LaterValues) for one in tree_leaves((arguments, keyword_arguments)))
    if func._schema.is_mutable or not is_later:
        return None
    first, *rest = arguments
    if func is aten._to_copy.default:
        is_plain = set(keyword_arguments) <= {"dtype", "non_blocking"}
        return first.values(keyword_arguments.get("dtype") or first.dtype) if is_plain else None
    if moves_values(func):
        return _moved(functools.partial(func, **keyword_arguments), func, first, rest)
    if torch.Tag.pointwise in func.tags:
        return _by_number(func, arguments, keyword_arguments)
    if func in _ALONG_CLASSES:
        return _along_classes(func, first, rest, keyword_arguments)
    run = _RUN.get(func)
    return run(func, *arguments) if run is not None and not keyword_arguments else None


def _is_wide(shape: torch.Size, device: torch.device) -> bool:
    """Says whether a tensor has many rows of a vocabulary."""
    is_many = math.prod(shape) >= LEAST_ELEMENTS.get(device.type, math.inf)
    return len(shape) > 1 and shape[-1] >= LEAST_CLASSES and is_many


def _is_last(dim: Any, shape: torch.Size) -> bool:
    dims = [dim] if isinstance(dim, int) else dim
    return dims is not None and [one % len(shape) for one in dims] == [len(shape) - 1]


def _returns_one_tensor(func: Any) -> bool:
    return [str(returned.type) for returned in func._schema.returns] == ["Tensor"]


# -- the same values elsewhere -----------------------------------------------------------------------------------------


def _moved(run: Callable[..., Tensor], func: Any, source: LaterValues, rest: list[Any]) -> LaterValues | None:
    def move(values: Tensor) -> Tensor:
        return run(values, *rest)

    if not _returns_one_tensor(func):
        return None
    shape = move(torch.empty(source.shape, dtype=source.dtype, device="meta")).shape
    if not isinstance(source, InRows) or not shape or shape[-1] != source.shape[-1]:
        return Moved(source, move, shape)
    packet, lead = func.overloadpacket, source.shape[:-1]
    if packet in _KEEP_ORDER or (packet is aten.slice and shape == source.shape):
        return MovedRows(source, move, shape, None)
    dim = rest[0] if packet in (aten.slice, aten.select) and rest else rest[1] if len(rest) > 1 else None
    num_dims = len(shape) if packet in (aten.slice_backward, aten.select_backward) else len(source.shape)
    if not isinstance(dim, int) or dim % num_dims == num_dims - 1:
        return Moved(source, move, shape)
    dim %= num_dims
    numbers = torch.arange(source.num_rows, device=source.device).view(lead)
    if packet in (aten.slice, aten.select):
        return MovedRows(source, move, shape, run(numbers, dim, *rest[1:]).reshape(-1))
    if packet in (aten.slice_backward, aten.select_backward):  # from 1 on, so that what is 0 has come from nowhere
        placed = run(numbers + 1, list(shape[:-1]), dim, *rest[2:]).reshape(-1) - 1
        return MovedRows(source, move, shape, placed, has_gaps=True)
    return Moved(source, move, shape)


# -- each number by itself ---------------------------------------------------------------------------------------------


def _by_number(func: Any, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> LaterValues | Tensor | None:
    given = [one for one in arguments if isinstance(one, (Tensor, LaterValues))]
    has_others = any(isinstance(one, (Tensor, LaterValues, list, tuple)) for one in keyword_arguments.values())
    if has_others or not _returns_one_tensor(func) or any(isinstance(one, (list, tuple)) for one in arguments):
        return None
    shape = torch.broadcast_shapes(*(one.shape for one in given))
    later = next(one for one in given if isinstance(one, LaterValues))
    if not isinstance(later, InRows) or not _is_wide(shape, later.device):
        return None
    by_row: set[int] = set()
    rows_of: list[Any] = []
    for number, one in enumerate(arguments):
        if isinstance(one, Tensor) and one.ndim:
            one, has_rows = _in_rows(one, shape)
            by_row |= {number} if has_rows else set()
        has_other_rows = isinstance(one, LaterValues) and (one.shape != shape or not isinstance(one, InRows))
        if one is NotImplemented or has_other_rows:
            return None
        rows_of.append(one)
    dtype = func(*map(_one_number, arguments), **keyword_arguments).dtype
    result = Computed(functools.partial(func, **keyword_arguments), tuple(rows_of), shape, frozenset(by_row))
    return result if dtype == torch.float32 and result.depth <= _DEEPEST else result.values(dtype)


def _one_number(argument: Any) -> Any:
    """Returns a tensor on meta with as many dims as an argument, for what decides the dtype of a result."""
    if not isinstance(argument, (Tensor, LaterValues)):
        return argument
    return torch.empty([1] * len(argument.shape), dtype=argument.dtype, device="meta")


def _in_rows(operand: Tensor, shape: torch.Size) -> tuple[Any, bool]:
    """Returns an operand of rows of `shape`, and whether it has an entry for each; NotImplemented if it is none."""
    if operand.shape == shape:
        return Held(operand, operand.dtype), False
    whole = operand.reshape([1] * (len(shape) - operand.ndim) + list(operand.shape))
    if math.prod(whole.shape[:-1]) == 1:
        return whole.reshape(1, -1), False
    if whole.shape[-1] == 1:
        return whole.expand(*shape[:-1], 1).reshape(-1, 1), True
    return NotImplemented, False


# -- along the classes -------------------------------------------------------------------------------------------------


def _along_classes(func: Any, source: Any, rest: list[Any], keyword_arguments: dict[str, Any]) -> Any:
    """Returns what an operation makes of each row, in full: one number."""
    if not isinstance(source, InRows) or not rest or not _is_last(rest[0], source.shape):
        return None
    dim = 1 if isinstance(rest[0], int) else [1]
    parts = [tree_leaves(func(source.rows(where), dim, *rest[1:], **keyword_arguments)) for where in source.chunks()]
    like = func(torch.empty(source.shape, dtype=source.dtype, device="meta"), *rest, **keyword_arguments)
    results = [torch.cat(pieces).view(meta.shape) for pieces, meta in zip(zip(*parts), tree_leaves(like), strict=True)]
    return results[0] if isinstance(like, Tensor) else tuple(results)


def _sum(func: Any, source: Any) -> Tensor | None:
    if not isinstance(source, InRows):
        return None
    return torch.stack([source.rows(where).sum() for where in source.chunks()]).sum()


def _of_each_row(func: Any, scores: Any, dim: int, half_to_float: bool) -> LaterValues | None:
    if not isinstance(scores, InRows) or not _is_last(dim, scores.shape):
        return None
    return Computed(lambda rows: func(rows, 1, half_to_float), (scores,), scores.shape)


def _back_of_each_row(func: Any, gradient: Any, output: Any, dim: int, dtype: torch.dtype) -> LaterValues | None:
    is_whole = isinstance(gradient, Tensor) and gradient.shape == output.shape
    gradient = Held(gradient, gradient.dtype) if is_whole else gradient
    if not isinstance(gradient, InRows) or not isinstance(output, InRows):
        return None
    if dtype != torch.float32 or not _is_last(dim, output.shape):
        return None
    return Computed(lambda given, rows: func(given, rows, 1, dtype), (gradient, output), output.shape)


def _chosen(
    func: Any, probabilities: Any, target: Tensor, weight: Any, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor] | None:
    """Returns what ``nll_loss_forward`` does: the loss, and the sum of the weights of its targets."""
    if not isinstance(probabilities, InRows) or len(probabilities.shape) != 2:
        return None
    of_a_chunk = _NONE if reduction == _NONE else _SUM
    parts = [
        func(probabilities.rows(where), target[where], weight, of_a_chunk, ignore_index)
        for where in probabilities.chunks()
    ]
    losses, weights = zip(*parts)
    if reduction == _NONE:
        return torch.cat(losses), weights[0]
    loss, total = torch.stack(losses).sum(), torch.stack(weights).sum()
    return (loss if reduction == _SUM else loss / total), total


def _chosen_backward(func: Any, gradient: Any, probabilities: Any, target: Tensor, *rest: Any) -> LaterValues | None:
    if not isinstance(probabilities, InRows) or len(probabilities.shape) != 2:
        return None
    gradient, classes = in_full(gradient), probabilities.shape[1]

    def of_rows(target: Tensor, gradient: Tensor) -> Tensor:
        like = torch.empty(len(target), classes, device=target.device)
        return func(gradient, like, target, *rest)  # type: ignore[no-any-return]

    by_row = frozenset({0, 1} if gradient.ndim else {0})
    return Computed(of_rows, (target, gradient), probabilities.shape, by_row)


def _gathered(func: Any, source: Any, dim: int, index: Tensor, sparse: bool = False) -> Tensor | None:
    is_by_row = isinstance(source, InRows) and _is_last(dim, source.shape) and index.shape[:-1] == source.shape[:-1]
    if not is_by_row or isinstance(index, LaterValues):
        return None
    flat = index.reshape(-1, index.shape[-1])
    return torch.cat([source.rows(where).gather(1, flat[where]) for where in source.chunks()]).view(index.shape)


def _zeros(source: Any, size: list[int], *, dtype: torch.dtype | None = None, **others: Any) -> LaterValues | None:
    device = source.device if isinstance(source, (Tensor, InRows)) else None
    is_plain = all(value is None for value in others.values()) and (dtype or source.dtype) == torch.float32
    return Zeros(torch.Size(size), device) if device and is_plain and _is_wide(torch.Size(size), device) else None


def _scattered(func: Any, base: Any, dim: int, index: Any, source: Any) -> LaterValues | None:
    is_by_row = isinstance(base, InRows) and isinstance(index, Tensor) and isinstance(source, Tensor)
    if not is_by_row or not _is_last(dim, base.shape) or not index.shape[:-1] == source.shape[:-1] == base.shape[:-1]:
        return None
    flat = index.reshape(-1, index.shape[-1]), source.reshape(-1, source.shape[-1])
    return Computed(lambda rows, *given: func(rows, 1, *given), (base, *flat), base.shape, frozenset({1, 2}))


_RUN: dict[Any, Callable[..., Any]] = {
    aten._log_softmax.default: _of_each_row,
    aten._softmax.default: _of_each_row,
    aten._log_softmax_backward_data.default: _back_of_each_row,
    aten._softmax_backward_data.default: _back_of_each_row,
    aten.nll_loss_forward.default: _chosen,
    aten.nll_loss_backward.default: _chosen_backward,
    aten.sum.default: _sum,
    aten.gather.default: _gathered,
    aten.scatter_add.default: _scattered,
}
