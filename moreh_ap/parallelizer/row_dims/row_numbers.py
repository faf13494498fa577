"""Numbers that follow the number of rows: as learned from trials, and as a forward on a slice computes with them.

Must not know what the numbers are used for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class RowCount(NamedTuple):
    """A number among the arguments of a call that follows the number of rows: `len(x)`, `2 * len(x)`, `len(x) - 1`.

    Attributes:
        position: Of the number, counted over all leaves of the arguments.
        multiple: Of the number of rows.
        added: What is added to that.
    """

    position: int
    multiple: int
    added: int = 0

    def of(self, rows: int) -> int:
        """Returns the number for so many rows."""
        return self.multiple * rows + self.added


class RowNumber(int):
    """A whole number that comes from the size of a tensor with this worker's rows, with that of the whole batch.

    What whole-number arithmetic makes of it is another one: `(start + len(x)) % size`. Everything else takes it for
    the number of this worker.

    Args:
        own: The number of this worker.
        everyone: What one device would have in its place.
    """

    everyone: int

    def __new__(cls, own: int, everyone: int) -> RowNumber:
        """Makes an integer, which is immutable, with the second number beside it."""
        made = super().__new__(cls, own)
        made.everyone = everyone
        return made


def _both(function: Callable[..., Any], *, is_turned: bool = False) -> Callable[..., Any]:
    def operation(self: RowNumber, *others: Any) -> Any:
        if not all(isinstance(other, int) for other in others):
            return NotImplemented
        both = [
            function(*(reversed((one, *rest)) if is_turned else (one, *rest)))
            for one, rest in (
                (int(self), [int(other) for other in others]),
                (self.everyone, [getattr(other, "everyone", other) for other in others]),
            )
        ]
        return RowNumber(*both)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(RowNumber, f"__{_name}__", _both(_function))
    setattr(RowNumber, f"__r{_name}__", _both(_function, is_turned=True))
RowNumber.__neg__ = _both(operator.neg)  # type: ignore[method-assign]


def row_sizes(size: Any, dim: int, everyone: Callable[[int], int]) -> Any:
    """Returns sizes of a tensor with the one of a dim as a `RowNumber`.

    Args:
        size: All sizes, or that of the dim.
        dim: The dim with rows.
        everyone: Returns what one device has in place of a number of entries there.
    """
    if not isinstance(size, torch.Size):
        return RowNumber(size, everyone(size))
    sizes = list(size)
    sizes[dim] = RowNumber(sizes[dim], everyone(sizes[dim]))
    return torch.Size(sizes)
