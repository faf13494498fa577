"""Large tensors over a vocabulary that have no values before something needs them, computed a few rows at a time.

Decides how rows of such a tensor follow from rows of others. Must not know which operations of a script lead to them,
or how a worker came by the operands.

A row is one entry of all dims but the last, which has the classes; rows are numbered as if those dims were one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.loss.chunked_cross_entropy import row_chunks

aten = torch.ops.aten

Where = slice | Tensor
"""Rows: a range of them, or their numbers."""
Seen = dict[tuple[int, int], tuple[Where, Tensor]]
"""Rows that were computed for the same chunk, by the tensor and the rows, which are kept so that their ids are."""


class LaterValues(ABC):
    """A tensor whose values are computed when they are asked for.

    Args:
        shape: Its shape.
        dtype: Its dtype, in which every chunk is computed.
        held: The precision of the logits that it comes from; a reader that needs no more asks for this one.
        sources: What it is computed from, if that has no values either.
    """

    def __init__(
        self, shape: torch.Size, dtype: torch.dtype, held: torch.dtype, sources: tuple[LaterValues, ...] = ()
    ) -> None:
        self.shape, self.dtype, self.held = shape, dtype, held
        self._sources = sources
        self.depth: int = 1 + max((source.depth for source in sources), default=0)
        self._settled: Tensor | None = None

    def values(self, dtype: torch.dtype) -> Tensor:
        """Returns all values, converted chunk by chunk."""
        return self._compute(dtype) if self._settled is None else self._settled.to(dtype)

    def settle(self) -> Tensor:
        """Computes the values for good, before something that they are computed from changes."""
        if self._settled is None:
            self._settled = self._compute(self.dtype)
        return self._settled

    def memory(self) -> set[int]:
        """Returns the addresses of the memory of what it is computed from."""
        own = {one.untyped_storage().data_ptr() for one in self._tensors()}
        return own.union(*(source.memory() for source in self._sources))

    def _tensors(self) -> list[Tensor]:
        """Returns the tensors with values that it is computed from, beside `sources`."""
        return []

    @abstractmethod
    def _compute(self, dtype: torch.dtype) -> Tensor:
        """Computes all values."""


class InRows(LaterValues):
    """Values that can be computed for some rows alone."""

    device: torch.device

    @property
    def num_rows(self) -> int:
        """How many rows it has."""
        return math.prod(self.shape[:-1])

    def chunks(self) -> Iterator[slice]:
        """Yields the rows of each chunk."""
        return row_chunks(self.num_rows, self.shape[-1], self.device.type)

    def rows(self, where: Where, seen: Seen | None = None) -> Tensor:
        """Returns (rows, classes); `seen` has what was computed for the same chunk."""
        if self._settled is not None:
            return _rows_of(self._settled, where)
        seen = {} if seen is None else seen
        key = id(self), id(where)
        if key not in seen:
            seen[key] = where, self._rows(where, seen)
        return seen[key][1]

    def _compute(self, dtype: torch.dtype) -> Tensor:
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        flat = result.view(-1, self.shape[-1])
        for where in self.chunks():
            flat[where] = self.rows(where)
        return result

    @abstractmethod
    def _rows(self, where: Where, seen: Seen) -> Tensor:
        """Computes some rows."""


class Held(InRows):
    """A tensor that has values, in a precision that may be less than what was promised of it."""

    def __init__(self, tensor: Tensor, promised: torch.dtype) -> None:
        super().__init__(tensor.shape, promised, tensor.dtype)
        self.tensor, self.device = tensor, tensor.device

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)

    def _tensors(self) -> list[Tensor]:
        return [self.tensor]

    def _rows(self, where: Where, seen: Seen) -> Tensor:
        return _rows_of(self.tensor, where).to(self.dtype)


class Computed(InRows):
    """The result of a function that works row by row, computed for some rows at a time.

    Args:
        function: Called with rows of the arguments.
        arguments: `InRows`; tensors with a number for each row, which are cut likewise; or anything else.
        shape: Of the result.
        by_row: Which arguments are tensors with an entry for each row, in dim 0.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: tuple[Any, ...],
        shape: torch.Size,
        by_row: frozenset[int] = frozenset(),
    ) -> None:
        sources = tuple(one for one in arguments if isinstance(one, InRows))
        kinds = [source.held for source in sources if source.held.is_floating_point]
        held = min(kinds, key=lambda dtype: dtype.itemsize, default=torch.float32)
        super().__init__(shape, torch.float32, held, sources)
        self._function, self._arguments, self._by_row = function, arguments, by_row
        tensors = (one for one in arguments if isinstance(one, Tensor))
        self.device = sources[0].device if sources else next(tensors).device

    def _tensors(self) -> list[Tensor]:
        return [one for one in self._arguments if isinstance(one, Tensor)]

    def _rows(self, where: Where, seen: Seen) -> Tensor:
        return self._function(
            *(
                one.rows(where, seen) if isinstance(one, InRows) else one[where] if number in self._by_row else one
                for number, one in enumerate(self._arguments)
            )
        )


class Zeros(InRows):
    """Zeros, until something is added to them."""

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        super().__init__(shape, torch.float32, torch.float32)
        self.device = device

    def _rows(self, where: Where, seen: Seen) -> Tensor:
        num_rows = len(range(self.num_rows)[where]) if isinstance(where, slice) else len(where)
        return torch.zeros(num_rows, self.shape[-1], device=self.device)


class Moved(LaterValues):
    """Values of `source` at other places: a view of them, or a copy."""

    def __init__(self, source: LaterValues, move: Callable[[Tensor], Tensor], shape: torch.Size) -> None:
        super().__init__(shape, source.dtype, source.held, (source,))
        self._move = move

    def settle(self) -> Tensor:
        return _settle_as_view(self, self._sources[0])

    def _compute(self, dtype: torch.dtype) -> Tensor:
        return self._move(self._sources[0].values(dtype))


class MovedRows(InRows):
    """Whole rows of `source` at other places.

    Args:
        source: What has the values.
        move: Moves all of them.
        shape: Of the result.
        numbers: The row of `source` that each row is; None if all stay in order.
        has_gaps: Whether rows whose number is -1 are zeros.
    """

    def __init__(
        self,
        source: InRows,
        move: Callable[[Tensor], Tensor],
        shape: torch.Size,
        numbers: Tensor | None,
        has_gaps: bool = False,
    ) -> None:
        super().__init__(shape, source.dtype, source.held, (source,))
        self._source, self._move, self._numbers, self.device = source, move, numbers, source.device
        self._has_gaps = has_gaps

    def settle(self) -> Tensor:
        return _settle_as_view(self, self._source)

    def _rows(self, where: Where, seen: Seen) -> Tensor:
        if self._numbers is None:
            return self._source.rows(where, seen)
        numbers = self._numbers[where]
        if not self._has_gaps:
            return self._source.rows(numbers, seen)
        rows = self._source.rows(numbers.clamp(min=0), seen)  # all of them: to pick some, the host would wait for a GPU
        return rows.masked_fill((numbers < 0).unsqueeze(-1), 0.0)


def _settle_as_view(moved: Moved | MovedRows, source: LaterValues) -> Tensor:
    """Gives a view its values in the memory of what it is a view of, so that they go on sharing it."""
    if moved._settled is None:
        moved._settled = moved._move(source.settle())
    return moved._settled


def _rows_of(tensor: Tensor, where: Where) -> Tensor:
    """Returns some rows of a tensor with values, without a copy of the others."""
    if tensor.ndim == 2:
        return tensor[where]
    if tensor.is_contiguous():
        return tensor.view(-1, tensor.shape[-1])[where]
    lead = tensor.shape[:-1]
    numbers = where
    if isinstance(where, slice):
        numbers = torch.arange(math.prod(lead), device=tensor.device)[where]
    assert isinstance(numbers, Tensor)
    return tensor[torch.unravel_index(numbers, lead)]
