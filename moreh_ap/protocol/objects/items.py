"""Items of a batch: what all kinds of them can do, and how some are chosen among nested arguments.

Decides what is looked into: lists, tuples, dicts and dataclasses. Must not know what the items are.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Items(ABC):
    """The items in the arguments of one call.

    Attributes:
        count: How many there are.
        beside: Named arguments that belong to no item.
        row_length: The length of the rows of which each item has one; None where items are no rows.
    """

    count: int
    beside: Mapping[str, Any] = {}
    row_length: int | None = None

    def select(self, chosen: Sequence[int]) -> Arguments:
        """Returns the arguments with the chosen items, given in rising order, alone."""
        args, kwargs = self._select(chosen)
        return args, {**kwargs, **self.beside}

    @abstractmethod
    def _select(self, chosen: Sequence[int]) -> Arguments: ...

    def lacks(self, chosen: Sequence[int]) -> bool:
        """Says whether the chosen items have nothing of a kind that others have: rows without a picture."""
        return False

    def differing_sizes(self) -> tuple[Any, ...]:
        """Returns for each tensor of an item in which dims the items differ; () where they differ by nature."""
        return ()


INSIDE = object()
"""What a choice says of a value that is kept, but for what it finds inside."""


def replaced(choose: Callable[[Any], Any], value: Any) -> Any:
    """Returns a value with what `choose` gives in place of the outermost parts that it knows."""
    found = choose(value)
    if found is not INSIDE:
        return found
    if type(value) in (list, tuple):
        return type(value)(replaced(choose, one) for one in value)
    if isinstance(value, tuple) and type(value).__bases__ == (tuple,) and not isinstance(value, torch.Size):
        return type(value)(*(replaced(choose, one) for one in value))
    if type(value) is dict:
        return {key: replaced(choose, one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(other, field.name, replaced(choose, getattr(value, field.name)))
        return other
    return value


def has_rows(value: Any, count: int) -> bool:
    """Says whether a value is a tensor with so many rows in its first dim; none that is sparse."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return is_dense and value.ndim > 0 and bool(value.shape[0] == count)


def replaced_in(choose: Callable[[Any], Any], given: Arguments) -> Arguments:
    """Returns arguments with what `choose` gives in place of the outermost parts that it knows."""
    args, kwargs = given
    return tuple(replaced(choose, one) for one in args), {name: replaced(choose, one) for name, one in kwargs.items()}
