"""Which tensors of an optimizer's state are laid out like their parameter.

Decides that by shapes, and by what is noted where these do not tell. Must not know optimizers or how state travels.

[Note: shapes by chance]
A tensor with a value for each element of its parameter has the parameter's shape; of a sharded one a worker holds a
shard of it, too. A tensor that is no such one (a product of rows, by which Shampoo multiplies gradients) is complete on
every worker. It may have the shape of a worker's shard by chance: a parameter of 48 x 24 has shards of 24 x 24.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeGuard

from torch import Tensor


class EntryLayouts:
    """Knows of entries of an optimizer's state, by parameter and key, whether they are laid out like the parameter."""

    def __init__(self) -> None:
        self._complete: dict[Tensor, set[Hashable]] = {}

    def is_laid_out(self, parameter: Tensor, key: Hashable, value: Any) -> TypeGuard[Tensor]:
        """Returns whether an entry has a value for each element that is held of its parameter."""
        has_shape = isinstance(value, Tensor) and value.dim() > 0 and value.shape == parameter.shape
        return has_shape and key not in self._complete.get(parameter, ())

    def note(self, parameter: Tensor, complete: Iterable[Hashable]) -> None:
        """Keeps which entries of a parameter's state are complete whatever their shape, from now on."""
        if found := set(complete):
            self._complete[parameter] = found
        else:
            self._complete.pop(parameter, None)

    def complete(self, parameter: Tensor) -> set[Hashable]:
        """Returns what was noted of a parameter."""
        return set(self._complete.get(parameter, ()))
