"""What the items of a batch are where entries lie flat and name the item that they belong to.

Must not know what is computed from them.

[Note: names]
The boxes of all pictures may lie in one tensor, each with the number of its picture in the first column; or the points
of all clouds in one, beside a vector with the number of each point's cloud. The numbers rise, and an item may have no
entry. Whatever has as many rows has an entry's in each; whatever has as many rows as there are items has an item's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.protocol.objects.items import Arguments, Items


class NamedItems(Items):
    """Entries with the number of their item; see [Note: names].

    Args:
        given: The arguments.
        names: A vector with the numbers, or a matrix with them in its first column.
        count: How many items there are.
    """

    def __init__(self, given: Arguments, names: Tensor, count: int) -> None:
        self._given, self._names, self.count = given, names, count

    def _select(self, chosen: Sequence[int]) -> Arguments:
        items = torch.tensor(list(chosen), device=self._names.device)
        places = torch.full((self.count,), -1, device=items.device)
        places[items] = torch.arange(len(items), device=items.device)
        numbers = places[_numbers(self._names).long()]
        kept = (numbers >= 0).nonzero()[:, 0]

        def choose(leaf: Any) -> Any:
            if leaf is self._names:
                alone = leaf[kept].clone()
                _numbers(alone).copy_(numbers[kept])
                return alone
            if not isinstance(leaf, Tensor) or not leaf.ndim:
                return len(items) if type(leaf) is int and leaf == self.count else leaf
            if leaf.shape[0] == self.count:
                return leaf[items.to(leaf.device)]
            return leaf[kept.to(leaf.device)] if len(leaf) == len(self._names) else leaf

        leaves, spec = tree_flatten(self._given)
        args, kwargs = tree_unflatten([choose(leaf) for leaf in leaves], spec)
        return args, kwargs


def find_named(given: Arguments) -> NamedItems | None:
    """Returns the items that entries of the arguments of a call name, None without."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    for names in tensors:
        if not (names.ndim == 1 or (names.ndim == 2 and names.shape[1] > 1)) or not _name_items(_numbers(names)):
            continue
        last, others = int(_numbers(names)[-1]), [leaf for leaf in tensors if leaf is not names and leaf.ndim]
        counts = [len(leaf) for leaf in others if len(leaf) > last and (names.ndim == 2 or len(leaf) != len(names))]
        # Numbers alone say how many items there are, unless they are something else that rises, such as times.
        if not counts and names.ndim == 1 and last < len(names) and any(len(leaf) == len(names) for leaf in others):
            counts = [last + 1]
        if counts and all(len(leaf) in (counts[0], len(names)) for leaf in others):
            return NamedItems(given, names, counts[0])
    return None


def _numbers(names: Tensor) -> Tensor:
    return names if names.ndim == 1 else names[:, 0]


def _name_items(numbers: Tensor) -> bool:
    """Says whether numbers rise from 0 or above, and are whole, with several entries for one of them."""
    if len(numbers) < 2 or numbers.dtype in (torch.bool, torch.uint8) or numbers.is_complex():
        return False
    if numbers.is_floating_point() and not bool((numbers.isfinite() & (numbers == numbers.floor())).all()):
        return False
    steps = numbers.diff()
    begins_and_rises = int(numbers[0]) >= 0 and int(numbers[-1]) > 0 and bool((steps >= 0).all())
    return begins_and_rises and bool((steps == 0).any())
