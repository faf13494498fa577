"""What the items of a batch are where sequences of unequal length are packed, or lie one behind the other.

Must not know what is computed from them.

[Note: bags]
Sequences of unequal length may lie one behind the other in one tensor, beside a vector that says where each begins, in
rising order from 0 (the offsets of `nn.EmbeddingBag`), with the end of the last one behind them or not. Whatever has
as many entries as all sequences together has an entry for each of theirs. A model with several
tables has a vector of offsets for each, which may be the rows of one tensor, and a list with the entries of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from moreh_ap.protocol.objects.items import INSIDE, Arguments, Items, has_rows, replaced_in


class PackedItems(Items):
    """Packed sequences, and tensors with a row for each sequence beside them."""

    def __init__(self, given: Arguments, count: int) -> None:
        self._given, self.count = given, count

    def _select(self, chosen: Sequence[int]) -> Arguments:
        def choose(value: Any) -> Any:
            if isinstance(value, PackedSequence):
                return _packed_alone(value, chosen)
            if has_rows(value, self.count):
                return value[torch.tensor(list(chosen), device=value.device)]
            return INSIDE

        return replaced_in(choose, self._given)


class Bags(Items):
    """Sequences one behind the other; see [Note: bags].

    Args:
        given: The arguments.
        offsets: Where each begins; has the end of the last one, too, if it is `ended`.
        total: Entries of all sequences together.
    """

    def __init__(self, given: Arguments, offsets: Tensor, total: int, *, ended: bool) -> None:
        self._given, self._offsets, self._total, self._ended = given, offsets, total, ended
        self.count = len(offsets) - ended
        self._ends = offsets[1:] if ended else torch.cat([offsets[1:], offsets.new_tensor([total])])

    def _select(self, chosen: Sequence[int]) -> Arguments:
        bags = torch.tensor(list(chosen), device=self._offsets.device)
        offsets, within = _bags_alone(self._offsets, self._ends, bags, ended=self._ended)
        of_size = {self._total: within, self.count: bags}

        def choose(leaf: Any) -> Any:
            if leaf is self._offsets:
                return offsets
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] in of_size:
                return leaf[of_size[leaf.shape[0]]]
            return leaf

        leaves, spec = tree_flatten(self._given)
        args, kwargs = tree_unflatten([choose(leaf) for leaf in leaves], spec)
        return args, kwargs


class BagTables(Items):
    """Sequences of several tables, each one behind the other; see [Note: bags].

    Args:
        given: The arguments.
        offsets: For each table where each sequence begins: a list of vectors, or the rows of a tensor.
        entries: The entries of each table.
    """

    def __init__(self, given: Arguments, offsets: Sequence[Tensor] | Tensor, entries: Sequence[Tensor]) -> None:
        self._given, self._offsets, self._entries = given, offsets, entries
        self.count = len(offsets[0])

    def _select(self, chosen: Sequence[int]) -> Arguments:
        places = torch.tensor(list(chosen), device=self._offsets[0].device)
        ends = [torch.cat([one[1:], one.new_tensor([len(own)])]) for one, own in zip(self._offsets, self._entries)]
        cut = [_bags_alone(one, end, places, ended=False) for one, end in zip(self._offsets, ends)]

        def choose(value: Any) -> Any:
            if value is self._offsets:
                offsets = [one for one, _ in cut]
                return torch.stack(offsets) if isinstance(value, Tensor) else offsets
            if value is self._entries:
                return [own[within] for own, (_, within) in zip(value, cut)]
            return value[places.to(value.device)] if has_rows(value, self.count) else INSIDE

        return replaced_in(choose, self._given)


def find_packed(given: Arguments) -> PackedItems | None:
    """Returns the packed sequences in the arguments of a call, None without."""
    counts: set[int] = set()

    def look(value: Any) -> Any:
        if not isinstance(value, PackedSequence):
            return INSIDE
        counts.add(int(value.batch_sizes[0]))
        return value

    replaced_in(look, given)
    return PackedItems(given, *counts) if len(counts) == 1 else None


def _packed_alone(packed: PackedSequence, chosen: Sequence[int]) -> PackedSequence:
    """Returns some of the sequences that were packed, in the order that they had before."""
    padded, lengths = pad_packed_sequence(packed, batch_first=True)
    places = torch.tensor(list(chosen))
    rows = padded[places.to(padded.device)]
    return pack_padded_sequence(rows, lengths[places], batch_first=True, enforce_sorted=packed.sorted_indices is None)


def _bags_alone(offsets: Tensor, ends: Tensor, bags: Tensor, *, ended: bool) -> tuple[Tensor, Tensor]:
    """Returns the offsets of some sequences alone, and where their entries lie among those of all."""
    starts, lengths = offsets[bags], ends[bags] - offsets[bags]
    behind = lengths.cumsum(0)
    alone = torch.cat([behind.new_zeros(1), behind if ended else behind[:-1]]).to(offsets.dtype)
    within = torch.arange(int(behind[-1]), device=bags.device) - (behind - lengths).repeat_interleave(lengths)
    return alone, starts.repeat_interleave(lengths) + within


def find_bags(given: Arguments) -> Bags | None:
    """Returns the sequences that lie one behind the other in the arguments of a call, None without."""
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    vectors = [leaf for leaf in tensors if leaf.ndim == 1 and leaf.dtype in (torch.int64, torch.int32)]
    for offsets in (leaf for leaf in vectors if len(leaf) > 1 and _rises_from_0(leaf)):
        for entries in vectors:
            total, last = len(entries), int(offsets[-1])
            if total >= last and total not in (len(offsets), len(offsets) - (total == last)):
                return Bags(given, offsets, total, ended=total == last)
    return None


def _rises_from_0(vector: Tensor) -> bool:
    return int(vector[0]) == 0 < int(vector[-1]) and bool((vector.diff() >= 0).all())


def find_tables(given: Arguments) -> BagTables | None:
    """As `find_bags`, for several tables."""
    lists: list[Sequence[Tensor]] = []
    stacks: list[Tensor] = []

    def look(value: Any) -> Any:
        if type(value) in (list, tuple) and value and all(_is_vector(one) for one in value):
            lists.append(value)
            return value
        if isinstance(value, Tensor) and value.layout is torch.strided and value.ndim == 2:
            stacks.extend([value] if _is_vector(value[:1].flatten()) else [])
        return INSIDE

    replaced_in(look, given)
    candidates: list[Sequence[Tensor] | Tensor] = [*stacks, *lists]
    for offsets in candidates:
        if any(len(one) < 2 or len(one) != len(offsets[0]) or not _rises_from_0(one) for one in offsets):
            continue
        for entries in lists:
            are_as_many = entries is not offsets and len(entries) == len(offsets)
            if are_as_many and all(len(own) > int(one[-1]) for one, own in zip(offsets, entries)):
                return BagTables(given, offsets, entries)
    return None


def _is_vector(value: Any) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return is_strided and value.ndim == 1 and len(value) > 0 and value.dtype in (torch.int64, torch.int32)
