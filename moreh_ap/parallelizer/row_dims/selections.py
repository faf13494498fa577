"""Whether a forward takes some rows of a batch by their values: the largest losses, a median.

Decides which functions do. Must not know how rows are tried (`trial/probe.py`).

[Note: selections]
The largest two thirds of all losses are, by chance, often the largest two thirds of each half, and both halves have the
same classes. So a comparison of a few rows does not show whether a forward that selects rows may run on slices of them.
Nor does it where a forward counts rows up, to drop those for which an expert has no capacity left: of a few, none is.
Where it asks how many rows it has selected, or takes the first of them, for the same purpose perhaps, rows that are all
alike show it (`equal_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SELECT = frozenset({"topk", "kthvalue", "median", "nanmedian", "quantile", "nanquantile", "mode", "unique"})
_SORT = frozenset({"sort", "argsort", "msort"})
"""These select if the numbers are no lengths, by which rows are sorted before they are packed."""
_PLACE_OF_DIM = {"topk": 2, "kthvalue": 2, "quantile": 2, "nanquantile": 2, "unique": 4}
_COUNT_UP = "cumsum"
"""Counts marks, which are 0 and 1, up: as a rule, how many rows before have gone to an expert. Sums of others are
offsets."""
_FIND = frozenset({"nonzero", "argwhere", "where", "masked_select"})
"""Functions whose results have as many entries as the values decide; `where` with one argument."""
_KEEP = frozenset({"__getitem__", "squeeze", "flatten", "unbind", "view", "reshape", "t", "to", "long", "contiguous"})
_ASK = frozenset({"__len__", "numel", "nelement", "size"})
_COUNT = frozenset({"sum", "count_nonzero"})
"""Functions that count the true entries of a mask."""
_COMPARE = frozenset({"gt", "ge", "lt", "le", "eq", "ne"})
_READ = frozenset({"item", "__int__", "__bool__", "__float__", "__index__", "tolist"})
COUNTS_SELECTED = "counts selected"
_OF_ALL = frozenset({"median", "nanmedian", "quantile", "nanquantile", "unique"})
"""These select among all entries where they are given no dim; the others along the last one."""


_SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]


class Selections(TorchFunctionMode):
    """While active, notes among how many entries along dim 0 functions select, in order.

    Args:
        saw: Gets `COUNTS_SELECTED` if the forward asks how many entries it has found, or takes the first of them.

    Attributes:
        sizes: The numbers of entries.
    """

    def __init__(self, saw: set[str] | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._saw = set() if saw is None else saw
        self._found: list[Tensor] = []
        self._counted: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _SELECT or name in _SORT:
            given = args[0] if args else kwargs.get("input")
            if isinstance(given, Tensor) and given.ndim and (name in _SELECT or given.is_floating_point()):
                self.sizes += given.shape[:1] if _is_along_first(name, given, args, kwargs) else ()
        if name == _COUNT_UP:
            given = args[0] if args else kwargs["input"]
            if given.ndim and bool(((given == 0) | (given == 1)).all()):
                self.sizes += given.shape[:1] if _is_along_first(name, given, args, kwargs) else ()
        if name in _COUNT and args and isinstance(args[0], Tensor) and args[0].dtype is torch.bool:
            return self._note(func(*args, **kwargs), self._counted)
        if self._counted and args and any(args[0] is one for one in self._counted):
            if name in _READ:
                self._saw.add(COUNTS_SELECTED)
            elif name.strip("_") in _COMPARE:
                return self._note(func(*args, **kwargs), self._counted)
        if (name in _FIND and (name != "where" or len(args) == 1)) or (name == "__getitem__" and self._finds(args[1])):
            return self._note(func(*args, **kwargs), self._found)
        if self._found and args and self._is_found(args[0]):
            if self.asks_how_many(func, args) or (name == "__getitem__" and _takes_first(args[1])):
                self._saw.add(COUNTS_SELECTED)
            if name in _KEEP:
                return self._note(func(*args, **kwargs), self._found)
        return func(*args, **kwargs)

    def asks_how_many(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
        """Says whether a function asks how many entries another has found."""
        asks = func == _SHAPE or getattr(func, "__name__", "") in _ASK
        return asks and bool(self._found) and bool(args) and self._is_found(args[0])

    @staticmethod
    def _note(result: Any, known: list[Tensor]) -> Any:
        """Adds a result to what is known of the same kind; returns it."""
        known += result if isinstance(result, (tuple, list)) else (result,)
        return result

    def _is_found(self, value: Any) -> bool:
        return any(value is one for one in self._found)

    def _finds(self, index: Any) -> bool:
        """Says whether an index selects as many entries as values decide."""
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(one, Tensor) and (one.dtype is torch.bool or self._is_found(one)) for one in parts)


def _takes_first(index: Any) -> bool:
    """Says whether an index is a slice of the first dim that ends somewhere."""
    first = index[0] if isinstance(index, tuple) and index else index
    return isinstance(first, slice) and first.stop is not None


def _is_along_first(name: str, given: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place = _PLACE_OF_DIM.get(name, 1)
    dim = kwargs.get("dim", args[place] if place < len(args) else None)
    if dim is None:
        return name in _OF_ALL or name == "msort" or given.ndim == 1
    return type(dim) is int and dim % given.ndim == 0


def selects_rows(together: Sequence[int], apart: Sequence[Sequence[int]]) -> bool:
    """Says whether functions select among rows, given the sizes noted for all rows together and for some apart.

    Where each row is gone through by itself, there are more of them for more rows.
    """
    return any(len(one) == len(together) and list(one) != list(together) for one in apart)
