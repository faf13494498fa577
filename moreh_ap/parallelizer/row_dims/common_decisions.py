"""Decisions that a forward takes for all rows of a batch by some of them: `if (x > 5).any():`, `x.amax().clamp(min=1)`.

Decides which functions find what it decides by, and what they would find beside other rows. Must not know how rows are
tried (`trial/probe.py`).

[Note: beside other rows]
Of a few rows, none may be such that the forward goes the other way. So it shows nothing that they give the same
together and apart: in a later batch a row on one worker makes one device go that way for all of them. A row is
therefore run once more as if there were such others: what `any` answers is true, what `all` answers is false, something
is found where nothing was, and a largest number is far beyond whatever the forward compares it with. A row may get
something else then (it decides for others), or the same (a mask that hides nothing is left out), or an error is raised
(a check of what is given), which shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.observation.torch_calls import map_leaves, names
from moreh_ap.parallelizer.row_dims.selections import Selections

DECIDE = "rows decide together what the forward does with each of them"
_TRUE_BESIDE_OTHERS = {"any": True, "contains": True, "all": False, "equal": False, "allclose": False}
"""Answers that other rows can bring about, never the opposite ones."""
_LARGEST = {"max": 1.0, "amax": 1.0, "min": -1.0, "amin": -1.0}
"""In which direction other rows can move what is found."""
_KEEPS = names(
    "to float double half bfloat16 detach clone view reshape squeeze cpu cuda contiguous item add mul div sub"
)
"""Functions of a largest number whose result goes to the same side of whatever it is compared with."""
_COMPARES = names("lt le gt ge less greater less_equal greater_equal")
_SWITCHES = _COMPARES | names(
    "clamp clip clamp_min clamp_max relu maximum minimum floor ceil round sign item float tolist bool"
)
"""Functions whose result changes its way at some number: these get a number far away."""
_FAR = 1e4
"""How far: this many times the number and one."""
ASKS = "asks how many"
"""What it is called that a forward asks how many entries a function has found."""


def _plain(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", "").strip("_")


def found_by(func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> tuple[str, int, int] | None:
    """Returns what a function that finds a decision is called, among how many entries, and for how many it does; None
    for other functions. Of whole numbers the largest is a length, see `MeanRules.extremes`."""
    name = _plain(func)
    if (name not in _TRUE_BESIDE_OTHERS and name not in _LARGEST) or not args or not isinstance(args[0], Tensor):
        return None
    values = result[0] if isinstance(result, tuple) else result
    if name in _LARGEST and not (isinstance(values, Tensor) and values.is_floating_point() and len(args) < 3):
        return None
    return name, args[0].numel(), values.numel() if isinstance(values, Tensor) else 1


Found = Sequence[tuple[str, int, int]]


def of_several_rows(together: Found, apart: Sequence[Found]) -> frozenset[int]:
    """Returns which decisions are found among several rows, by their numbers in the order of execution.

    Args:
        together: What was found for all rows together.
        apart: What was found for some of them each time.
    """
    if any([name for name, *_ in one] != [name for name, *_ in together] for one in apart):
        return frozenset()  # it goes other ways, and what that gives is compared
    return frozenset(
        number
        for number, (name, entries, results) in enumerate(together)
        if name == ASKS or any(one[number][1] != entries and one[number][2] == results for one in apart)
    )


def _some(number: Any) -> Any:
    """Returns a number of entries, or sizes, with one in place of none."""
    return type(number)(size or 1 for size in number) if isinstance(number, tuple) else number or 1


class BesideOthers(Selections):
    """While active, some decisions are what they would be beside other rows. See [Note: beside other rows].

    Args:
        which: The decisions, by their numbers.
    """

    def __init__(self, which: frozenset[int]) -> None:
        super().__init__()
        self._which, self._number = which, 0
        self._far: list[tuple[Tensor, Tensor]] = []  # largest numbers, and those beside other rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, _plain(func)
        if name in _SWITCHES:
            args, kwargs = map_leaves(self._beside_others, (args, kwargs))
        result, asks = super().__torch_function__(func, types, args, kwargs), self.asks_how_many(func, args)
        found = (ASKS, 0, 0) if asks else found_by(func, args, result)
        if found is not None:
            self._number += 1
            return self._decided(found[0], result) if self._number - 1 in self._which else result
        if name in _KEEPS and args and isinstance(result, Tensor):
            far = self._beside_others(args[0])
            if far is not args[0]:
                self._far.append((result, func(far, *args[1:], **kwargs)))
        return result

    def _decided(self, name: str, result: Any) -> Any:
        if name == ASKS:
            return _some(result)
        if name in _TRUE_BESIDE_OTHERS:
            answer = _TRUE_BESIDE_OTHERS[name]
            return torch.full_like(result, answer) if isinstance(result, Tensor) else answer
        values = (result[0] if isinstance(result, tuple) else result).detach()
        far = values + _LARGEST[name] * _FAR * (1 + values.abs())
        self._far.append((result[0] if isinstance(result, tuple) else result, far))
        return result

    def _beside_others(self, leaf: Any) -> Any:
        return next((far for known, far in self._far if leaf is known), leaf)
