"""What the items of a batch are where the pictures of all rows of tokens lie one behind the other.

Must not know what is computed from them.

[Note: pictures of rows]
Models that read pictures and words get the pictures of all rows in one tensor: an entry a picture (Gemma 3), or the
patches of all, beside the grid of each, of which the product is the number of its patches (Qwen2-VL and those after
it), or an entry a picture beside the size of each (Pixtral). Which pictures a row has is said by the tokens that stand
for them: one number, as often as the pictures of the row are large, and neither first nor last in a row as padding is.
A row has the next pictures whose size is what its tokens ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.objects.items import INSIDE, Arguments, Items, has_rows, replaced_in

_WHOLE_NUMBERS = (torch.int64, torch.int32)


class Pictures:
    """Pictures, or videos, that lie one behind the other.

    Args:
        sizes: Of each picture, in patches or pixels.
        entries: Those of all pictures: an entry each, or as many as its size.
        grids: What the sizes were read from, (pictures, 2 or 3); None without.
        bounds: For each row of tokens its first picture, and behind them the number of pictures.
    """

    def __init__(self, sizes: Sequence[int], entries: Tensor, grids: Tensor | None, bounds: Sequence[int]) -> None:
        self.count, self.entries, self.grids = len(sizes), entries, grids
        self._lengths = list(sizes) if len(entries) != self.count else [1] * self.count
        self._bounds = bounds

    def of_rows(self, rows: Sequence[int]) -> Tensor:
        """Returns the numbers of the pictures that rows have."""
        numbers = [one for row in rows for one in range(self._bounds[row], self._bounds[row + 1])]
        return torch.tensor(numbers, dtype=torch.int64)

    def entries_of(self, pictures: Tensor) -> Tensor:
        """Returns the entries of some pictures."""
        pieces = self.entries.split(self._lengths)
        return torch.cat([pieces[one] for one in pictures.tolist()] or [self.entries[:0]])


class PictureRows(Items):
    """Rows of tokens and the pictures of each; see [Note: pictures of rows].

    Args:
        given: The arguments.
        tokens: (rows, length).
        pictures: Those of each tensor that has some: pictures, videos.
    """

    def __init__(self, given: Arguments, tokens: Tensor, pictures: Sequence[Pictures]) -> None:
        self._given, self._pictures = given, pictures
        self.count, self.row_length = tokens.shape

    def lacks(self, chosen: Sequence[int]) -> bool:
        return any(len(kind.of_rows(chosen)) == 0 for kind in self._pictures)

    def _select(self, chosen: Sequence[int]) -> Arguments:
        rows = torch.tensor(list(chosen))
        taken = [(kind, kind.of_rows(chosen)) for kind in self._pictures]

        def choose(value: Any) -> Any:
            for kind, own in taken:
                if value is kind.entries:
                    return kind.entries_of(own)
                if kind.grids is not None and value is kind.grids:
                    return value[own.to(value.device)]
            if has_rows(value, self.count):
                return value[rows.to(value.device)]
            for kind, own in taken:
                if has_rows(value, kind.count):
                    return value[own.to(value.device)]
            return INSIDE

        return replaced_in(choose, self._given)


def find_pictures(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PictureRows | None:
    """Returns the rows and their pictures in the arguments of a call, None without."""
    given = tuple(args), dict(kwargs)
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
    grids = [leaf for leaf in tensors if _is_grids(leaf)]
    entries = [leaf for leaf in tensors if leaf.ndim > 1 and leaf.is_floating_point()]
    tokens = [one for one in tensors if one.ndim == 2 and one.dtype in _WHOLE_NUMBERS and not _is_grids(one)]
    if not tokens or not entries or not tokens[0].numel():
        return None
    found, count = [], len(tokens[0])
    one_each = list(range(count + 1))  # with an entry each: ordinary rows
    tokens = [one for one in tokens if len(one) == count]
    for one in grids:
        sizes = one.prod(1).tolist()
        own = next((leaf for leaf in entries if len(leaf) in (sum(sizes), len(sizes))), None)
        if own is None or (bounds := _bounds(sizes, tokens)) is None:
            return None
        entries = [leaf for leaf in entries if leaf is not own]
        if len(own) != count or bounds != one_each:
            found.append(Pictures(sizes, own, one, bounds))
    for own in entries:
        bounds = _bounds([1] * len(own), tokens[:1]) if own.ndim > 2 and len(own) > 1 else None
        if bounds is not None and bounds != one_each:
            found.append(Pictures([1] * len(own), own, None, bounds))
    return PictureRows(given, tokens[0], found) if found else None


def _is_grids(tensor: Tensor) -> bool:
    has_sizes = tensor.ndim == 2 and tensor.dtype in _WHOLE_NUMBERS and 2 <= tensor.shape[1] <= 3
    return has_sizes and len(tensor) > 0 and bool((tensor > 0).all())


def _bounds(sizes: Sequence[int], tokens: Sequence[Tensor]) -> list[int] | None:
    """Returns the first picture of each row, and behind them their number; None where no number stands for them.

    Args:
        sizes: The size of each picture. Patches or pixels share a token; a picture of size 1 has several in a run.
        tokens: Matrices of whole numbers with the same rows.
    """
    total, are_alike = sum(sizes), sum(sizes) == len(sizes)
    ends = {0: 0, **{end: number for number, end in enumerate(accumulate(sizes), start=1)}}
    for matrix in tokens:
        numbers, places, each = matrix.cpu().unique(return_inverse=True, return_counts=True)
        shares = each % total == 0 if are_alike else total % each == 0
        columns = torch.where(shares & (each > (total if are_alike else 1)) & (numbers > 0))[0].tolist()
        for column in sorted(columns, key=each.tolist().__getitem__, reverse=True):  # pictures take most of the words
            standing, is_here = int(each[column]), places == column
            if bool(is_here[:, 0].any() | is_here[:, -1].any()):  # padding
                continue
            if are_alike and bool((_runs(is_here) % (standing // total)).any()):
                continue
            behind = [end * total for end in is_here.sum(1).cumsum(0).tolist()]
            if all(end % standing == 0 and end // standing in ends for end in behind):
                return [0, *(ends[end // standing] for end in behind)]
    return None


def _runs(is_here: Tensor) -> Tensor:
    """Returns the lengths of the runs of true elements in rows that neither begin nor end with one."""
    starts, stops = (
        torch.where(one.flatten())[0] for one in (is_here[:, 1:] & ~is_here[:, :-1], is_here[:, :-1] & ~is_here[:, 1:])
    )
    return stops - starts
