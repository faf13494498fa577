"""Numbers that follow the number of rows: as learned from trials, and as a forward on a slice computes with them.

Must not know what the numbers are used for.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moreh_ap.parallelizer.observation.number_arithmetic import define_arithmetic
from moreh_ap.patching import Patches


class RowCount(NamedTuple):
    """A number among the arguments of a call that follows the number of rows: `len(x)`, `2 * len(x)`, `len(x) - 1`.

    Attributes:
        position: Of the number, counted over all leaves of the arguments.
        multiple: Of the number of rows. 0: it follows that in another way (`int(1.25 * len(x) / experts)`), and is
            known for all rows of one batch only.
        added: What is added to that.
    """

    position: int
    multiple: int
    added: int | float = 0

    @property
    def is_of_one_size(self) -> bool:
        """Whether the number is known for batches of one size only."""
        return not self.multiple

    def of(self, rows: int) -> int | float:
        """Returns the number for so many rows."""
        return self.multiple * rows + self.added


class RowNumber(int):
    """A whole number that comes from the size of a tensor with this worker's rows, with that of the whole batch.

    What arithmetic makes of it is another one, or a `RowFloat`: `(start + len(x)) % size`, `n**2 - n`. Everything else
    takes it for the number of this worker.

    Args:
        own: The number of this worker.
        everyone: What one device would have in its place.
    """

    everyone: int | float

    def __new__(cls, own: int, everyone: int) -> RowNumber:
        """Makes an integer, which is immutable, with the second number beside it."""
        made = super().__new__(cls, own)
        made.everyone = everyone
        return made


class RowFloat(float):
    """As `RowNumber`, where arithmetic has made a number with a fraction of it: `1 / n`."""

    everyone: int | float

    def __new__(cls, own: float, everyone: float) -> RowFloat:
        """Makes a number, which is immutable, with the second one beside it."""
        made = super().__new__(cls, own)
        made.everyone = everyone
        return made


def own_of(number: Any) -> Any:
    """Returns the plain number of this worker."""
    return int(number) if isinstance(number, RowNumber) else float(number) if isinstance(number, RowFloat) else number


def everyone_s(number: Any) -> Any:
    """Returns the plain number of the whole batch; whatever does not follow the rows is everyone's."""
    return getattr(number, "everyone", number)


def of_both(function: Callable[..., Any], *numbers: Any) -> Any:
    """Returns what a function makes of numbers, for this worker's rows and for those of the whole batch."""
    own = function(*map(own_of, numbers))
    if not any(isinstance(number, (RowNumber, RowFloat)) for number in numbers) or not isinstance(own, (int, float)):
        return own
    everyone = function(*map(everyone_s, numbers))
    return RowNumber(own, everyone) if isinstance(own, int) and isinstance(everyone, int) else RowFloat(own, everyone)


def _of_numpy(self: Any, function: Any, method: str, *given: Any, **options: Any) -> Any:
    if method == "__call__" and not options:
        return of_both(lambda *numbers: _plain(function(*numbers)), *given)
    return getattr(function, method)(*map(own_of, given), **options)


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 else value


for _kind in (RowNumber, RowFloat):
    define_arithmetic(_kind, of_both)
    _kind.__array_ufunc__ = _of_numpy  # type: ignore[union-attr]

_OF_MATH = ("log", "log2", "log10", "log1p", "sqrt", "exp", "pow", "ceil", "floor")


@contextmanager
def math_of_both() -> Iterator[None]:
    """Inside, functions of the module `math` know the numbers of the whole batch, too: `math.log(n)`."""
    patches = Patches()
    group = patches.group("Numbers that a forward computes from the number of its rows.")
    for name in _OF_MATH:
        group.replace(math, name, _knowing_both(getattr(math, name)))
    try:
        yield
    finally:
        patches.undo()


_len = builtins.len


def _length(value: Any, /) -> int:
    """Knows the rows of the whole batch, too, where it is asked for those of a tensor."""
    return value.size(0) if isinstance(value, Tensor) and value.ndim else _len(value)


@contextmanager
def lengths_of_both() -> Iterator[None]:
    """Inside, `len` of a tensor is `size(0)`, which a torch function mode may give both numbers. Python makes a plain
    number of what a tensor says itself."""
    patches = Patches()
    patches.group("Numbers that a forward computes from the number of its rows.").replace(builtins, "len", _length)
    try:
        yield
    finally:
        patches.undo()


def _knowing_both(function: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(*numbers: Any) -> Any:
        """Computes with the number of the whole batch, too."""
        return of_both(function, *numbers)

    return replacement


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
