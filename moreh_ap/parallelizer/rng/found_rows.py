"""Which rows a forward found in masks of several dims: how many in each entry of the first.

Decides how rows that were found follow each other. Must not know what is done with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FINDS_ROWS = frozenset({"where", "nonzero", "argwhere"})
"""Names of torch functions that return the indices of what is true in a mask, sorted by its first dim."""


class FoundRows:
    """What was found so far: for each number of rows, how many of them are in each entry of the mask's first dim."""

    def __init__(self) -> None:
        self._groups: dict[int, list[int]] = {}

    def kept(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Notes and returns what such a function found."""
        mask = args[0] if len(args) == 1 else None
        if isinstance(mask, Tensor) and mask.ndim > 1 and not kwargs.keys() - {"as_tuple"}:
            first = result[0] if isinstance(result, tuple) else result[:, 0]
            self._groups[len(first)] = torch.bincount(first, minlength=mask.shape[0]).tolist()
        return result

    def groups_of(self, number: int) -> list[int] | None:
        """Returns how so many rows, found last, lie in the first dim of their mask; None if none were."""
        return self._groups.get(number)
