"""Log-probabilities over many classes whose values are not computed before something needs them, a few rows at a time.

Decides which ATen operations of a script's loss go on with such values, and computes them chunk by chunk. Must not know
how a worker came by the operands, or which rows of the batch they are.

[Note: the same operations]
A loss that a script computes from logits, ``F.cross_entropy(logits.view(-1, classes), labels)``, is four operations:
`_log_softmax`, `nll_loss_forward` and their two backwards. Three of the four results are as large as the logits, in
float32. Here they are `LaterValues`. The two results that matter, the loss and the gradient of the logits, are computed
by the same four operations on a chunk of rows, so each number is the one that PyTorch computes; only the order in which
the rows' losses are added differs. Log-probabilities are computed once more in the backward, which costs less than
reading whole ones from memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.parallelizer.loss.chunked_cross_entropy import LEAST_CLASSES, are_many, chunks

aten = torch.ops.aten

_NONE, _SUM = 0, 2  # as `torch.nn._reduction` numbers them
_LOW_PRECISION = (torch.bfloat16, torch.float16)
_MOVES = {aten.reshape, aten._unsafe_view, aten.clone, aten.slice_backward, aten.select_backward}
"""Operations beside views that put the values of their operand elsewhere, in any precision."""


class LaterValues(ABC):
    """A tensor whose values are computed when they are asked for.

    Args:
        shape: Its shape.
        dtype: Its dtype, in which every chunk is computed.
        held: The precision of the logits that it comes from; a reader that needs no more asks for this one.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, held: torch.dtype) -> None:
        self.shape, self.dtype, self.held = shape, dtype, held
        self._settled: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Returns all values, converted chunk by chunk."""
        return self._compute(dtype) if self._settled is None else self._settled.to(dtype)

    def settle(self) -> Tensor:
        """Computes the values for good, before something that they are computed from changes."""
        if self._settled is None:
            self._settled = self._compute(self.dtype)
        return self._settled

    @abstractmethod
    def _compute(self, dtype: torch.dtype) -> Tensor:
        """Computes all values."""


class _InRows(LaterValues):
    """Values of (rows, classes) that can be computed for some rows alone."""

    def __init__(self, scores: Tensor, dtype: torch.dtype, held: torch.dtype) -> None:
        super().__init__(scores.shape, dtype, held)
        self.scores = scores

    def chunks(self) -> Iterator[slice]:
        return chunks(self.scores)

    def _compute(self, dtype: torch.dtype) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.scores.device)
        for rows in self.chunks():
            result[rows] = self.rows(rows)
        return result

    @abstractmethod
    def rows(self, rows: slice) -> Tensor:
        """Computes some rows."""


class _LogProbabilities(_InRows):
    """``_log_softmax`` of float32 scores, which may be held in less."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__(scores, torch.float32, torch.float32)

    def rows(self, rows: slice) -> Tensor:
        if self._settled is not None:
            return self._settled[rows]
        return aten._log_softmax.default(self.scores[rows].float(), 1, False)


class _ChosenBackward(_InRows):
    """``nll_loss_backward`` of log-probabilities; `arguments` are those behind the log-probabilities."""

    def __init__(self, gradient: Tensor, probabilities: _LogProbabilities, arguments: tuple[Any, ...]) -> None:
        super().__init__(probabilities.scores, torch.float32, torch.float32)
        self.gradient, (self._target, *self._rest) = gradient, arguments

    def rows(self, rows: slice) -> Tensor:
        if self._settled is not None:
            return self._settled[rows]
        like = torch.empty_like(self.scores[rows], dtype=torch.float32)
        gradient = self.gradient[rows] if self.gradient.ndim else self.gradient
        return aten.nll_loss_backward.default(gradient, like, self._target[rows], *self._rest)


class _ScoresBackward(_InRows):
    """``_log_softmax_backward_data``: the gradient of the scores, wanted in float32."""

    def __init__(self, gradient: _ChosenBackward, probabilities: _LogProbabilities) -> None:
        super().__init__(probabilities.scores, torch.float32, probabilities.scores.dtype)
        self.gradient, self.probabilities = gradient, probabilities

    def rows(self, rows: slice) -> Tensor:
        gradient, probabilities = self.gradient.rows(rows), self.probabilities.rows(rows)
        return aten._log_softmax_backward_data.default(gradient, probabilities, 1, torch.float32)


class _Moved(LaterValues):
    """Values of `source` at other places: a view of them, or a copy."""

    def __init__(self, source: LaterValues, move: Callable[[Tensor], Tensor]) -> None:
        shape = move(torch.empty(source.shape, dtype=source.dtype, device="meta")).shape
        super().__init__(shape, source.dtype, source.held)
        self.source, self._move = source, move

    def settle(self) -> Tensor:
        self.source.settle()  # views go on sharing its memory
        return super().settle()

    def _compute(self, dtype: torch.dtype) -> Tensor:
        return self._move(self.source.values(dtype))


def moves_values(func: Any) -> bool:
    """Says whether the result of an ATen operation has the values of its operand, at other places."""
    return (func.is_view or func.overloadpacket in _MOVES) and func is not aten.view.dtype


def log_probabilities(func: Any, scores: Tensor, promised: torch.dtype, arguments: tuple[Any, ...]) -> Any:
    """Returns ``_log_softmax`` of many float32 scores over a vocabulary as `LaterValues`; None for anything else.

    Args:
        func: An ATen operation.
        scores: Its first operand, which may be held in less precision.
        promised: The dtype that the script knows of it.
        arguments: The others.
    """
    if (
        func is not aten._log_softmax.default
        or promised != torch.float32
        or scores.ndim != 2
        or arguments[0] not in (1, -1)
    ):
        return None
    is_wide = scores.shape[1] >= LEAST_CLASSES and are_many(scores)
    return _LogProbabilities(scores) if is_wide and scores.dtype in (torch.float32, *_LOW_PRECISION) else None


def only_widens(func: Any, scores: Tensor, promised: torch.dtype, keyword_arguments: dict[str, Any]) -> bool:
    """Says whether an operation converts many numbers to float32 and does nothing else with them."""
    if func is not aten._to_copy.default or scores.dtype != promised or promised not in _LOW_PRECISION:
        return False
    given = {name: value for name, value in keyword_arguments.items() if value is not None}
    is_plain = given.pop("memory_format", torch.preserve_format) == torch.preserve_format
    given.pop("non_blocking", None)
    return is_plain and given == {"dtype": torch.float32} and are_many(scores)


def in_full(value: Any) -> Any:
    """Returns the values of `LaterValues` in their dtype, anything else as it is."""
    return value.values(value.dtype) if isinstance(value, LaterValues) else value


def run_on_later_values(func: Any, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> Any:
    """Returns the result of an operation whose operands may be `LaterValues`.

    Operations other than those in [Note: the same operations] get their values in full.
    """
    if not any(isinstance(one, LaterValues) for one in tree_leaves((arguments, keyword_arguments))):
        return func(*arguments, **keyword_arguments)
    result = _continued(func, arguments, keyword_arguments)
    if result is not None:
        return result
    arguments, keyword_arguments = tree_map(in_full, (arguments, keyword_arguments))
    return func(*arguments, **keyword_arguments)


def _continued(func: Any, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]) -> Any:
    """Returns what goes on without all values; None if they are needed."""
    first, *rest = arguments
    if isinstance(first, LaterValues) and func is aten._to_copy.default:
        is_plain = set(keyword_arguments) <= {"dtype", "non_blocking"}
        return first.values(keyword_arguments.get("dtype") or first.dtype) if is_plain else None
    if keyword_arguments:
        return None
    if isinstance(first, LaterValues) and moves_values(func) and _returns_one_tensor(func):
        return _Moved(first, lambda values: func(values, *rest))
    if isinstance(first, _LogProbabilities) and func is aten.nll_loss_forward.default:
        return _chosen(first, *rest)
    if func is aten.nll_loss_backward.default and isinstance(rest[0], _LogProbabilities):
        first = in_full(first)
        return _ChosenBackward(first, rest[0], tuple(rest[1:]))
    if func is aten._log_softmax_backward_data.default and isinstance(first, _ChosenBackward):
        probabilities, dim, dtype = rest
        if isinstance(probabilities, _LogProbabilities) and dim in (1, -1) and dtype == torch.float32:
            return _ScoresBackward(first, probabilities)
    return None


def _returns_one_tensor(func: Any) -> bool:
    return [str(returned.type) for returned in func._schema.returns] == ["Tensor"]


def _chosen(probabilities: _LogProbabilities, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    """Returns what ``nll_loss_forward`` does: the loss, and the sum of the weights of its targets."""
    of_a_chunk = _NONE if reduction == _NONE else _SUM
    parts = [
        aten.nll_loss_forward.default(probabilities.rows(rows), target[rows], weight, of_a_chunk, ignore_index)
        for rows in probabilities.chunks()
    ]
    losses, weights = zip(*parts)
    if reduction == _NONE:
        return torch.cat(losses), weights[0]
    loss, total = torch.stack(losses).sum(), torch.stack(weights).sum()
    return (loss if reduction == _SUM else loss / total), total
