"""Arguments that are no tensors and have an entry for each row: a list of lengths, of texts, an array of NumPy.

Decides which arguments these are, and how their entries travel. Must not know how rows are shared.

[Note: listed rows]
Plain values among the arguments are part of what calls of one kind have in common, and are whole on every worker. A
list with an entry for each row (the lengths that `pack_padded_sequence` is given) differs from batch to batch, and has
to be cut with the rows. So it travels as a tensor with a row for each entry, under one more keyword, and the forward
gets it as it was. A list that happens to have as many entries (the sizes of a kernel) would be cut, too: the split
check fails then, and such arguments travel as they are from then on.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moreh_ap.protocol.objects.items import INSIDE, Arguments, replaced_in

LISTED_ROWS = "arguments with an entry for each row"
"""The keyword under which they travel, ``{place: tensor}``; no forward has an argument of that name."""

_PLAIN = (bool, int, float, str, bytes, type(None), np.generic)
_WIDTH = 64  # bytes of an entry, or a multiple: calls whose tensors have equal sizes are prepared once


def set_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments | None:
    """Returns arguments with the entries of lists as tensors, a word in each list's place; None without such lists.

    The rows are counted by the first tensor, along dim 0 or 1, or else by the first list or array.

    Example:
        >>> args, kwargs = set_apart((torch.zeros(2, 5), [5, 3]), {})
        >>> kwargs[LISTED_ROWS]
        {'list 0': tensor([5, 3])}
        >>> put_back(args, kwargs)[0][1]
        [5, 3]
    """
    tensors = (leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor) and leaf.ndim)
    sizes = next((set(leaf.shape[:2]) for leaf in tensors), None)
    found: dict[str, Tensor] = {}

    def take(value: Any) -> Any:
        nonlocal sizes
        kind = "array" if isinstance(value, np.ndarray) else type(value).__name__
        is_list = type(value) in (list, tuple) or (kind == "array" and value.ndim > 0)
        if not is_list or len(value) < 2 or (sizes is not None and len(value) not in sizes):
            return INSIDE
        entries = _of_array(value) if kind == "array" else _of_list(value)
        if entries is None:
            return INSIDE
        sizes = sizes or {len(value)}
        place = f"{kind} {len(found)}"
        found[place] = entries
        return f"{LISTED_ROWS}: {place}"

    given = replaced_in(take, (tuple(args), dict(kwargs)))
    return (given[0], {**given[1], LISTED_ROWS: found}) if found else None


def put_back(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """Returns the arguments of the forward itself, with as many entries in each list as there are rows of it."""
    lists = {f"{LISTED_ROWS}: {place}": _restored(place, rows) for place, rows in kwargs[LISTED_ROWS].items()}

    def give(value: Any) -> Any:
        return lists.get(value, INSIDE) if type(value) is str else INSIDE

    return replaced_in(give, (tuple(args), {name: value for name, value in kwargs.items() if name != LISTED_ROWS}))


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, _PLAIN) or (isinstance(value, np.ndarray) and value.dtype != object)


def _of_list(values: Any) -> Tensor | None:
    """Returns a vector of whole numbers, or else rows of bytes; None if the list has other things in it."""
    if all(type(one) is int and abs(one) < 2**63 for one in values):
        return torch.tensor(values)
    if not all(map(_is_plain, values)):
        return None
    written = [pickle.dumps(one) for one in values]
    width = -(-max(map(len, written)) // _WIDTH) * _WIDTH
    rows = np.frombuffer(b"".join(one.ljust(width, b"\0") for one in written), dtype=np.uint8)
    return torch.from_numpy(rows.copy()).reshape(len(values), width)


def _of_array(array: np.ndarray[Any, Any]) -> Tensor | None:
    try:
        return torch.from_numpy(array.copy())
    except TypeError:  # of texts or objects
        return None


def _restored(place: str, rows: Tensor) -> Any:
    rows = rows.detach().cpu()
    kind = place.partition(" ")[0]
    if kind == "array":
        return rows.numpy()
    entries = rows.tolist() if rows.ndim == 1 else [pickle.loads(row.tobytes()) for row in rows.numpy()]
    return tuple(entries) if kind == "tuple" else entries
