"""Modules that get one device's tensor on every worker, of which each may compute a part: experts that a product deals
places to, heads behind rows that were gathered.

Decides which modules compute the entries along the first dim of their argument one by one, and draw nothing. Must not
know how workers deal them (`data/row_gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.observation.torch_calls import leaves_of, map_leaves
from moreh_ap.parallelizer.rng.shared_draws import MAY_DRAW
from moreh_ap.parallelizer.row_dims.row_steps import Rows
from moreh_ap.parallelizer.row_dims.selections import Selections, selects_rows

_PLACES_OF_PROBABILITY = {"dropout": 1, "scaled_dot_product_attention": 4}


def dealt_tensor(leaves: list[Any]) -> Tensor | None:
    """Returns the one tensor among the leaves of a module's arguments whose entries along dim 0 may be dealt out."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    is_one = len(tensors) == 1 and tensors[0].ndim > 1 and len(tensors[0]) > 1
    return tensors[0] if is_one and tensors[0].is_floating_point() else None


def with_part(given: Tensor, start: int, stop: int, arguments: Any) -> Any:
    """Returns arguments with entries `start` to `stop` of a tensor among them."""
    part = given.narrow(0, start, stop - start)
    return map_leaves(lambda leaf: part if leaf is given else leaf, arguments)


def dealt_along(
    call: Callable[..., Any], arguments: tuple[Any, dict[str, Any]], is_same: Callable[[Tensor, Tensor], bool]
) -> Rows | None:
    """Returns where the result of a module has the entries that its argument has along dim 0; None if it does not
    compute them one by one, or draws.

    Args:
        call: Calls the module.
        arguments: Positional and keyword ones.
        is_same: Says whether two tensors are the same but for rounding.
    """
    given = dealt_tensor(leaves_of(arguments))
    if given is None:
        return None
    results, selections, entries = [], [Selections() for _ in range(3)], len(given)
    middle = entries // 2
    for selected, (start, stop) in zip(selections, ((0, entries), (0, middle), (middle, entries)), strict=True):
        args, kwargs = with_part(given, start, stop, arguments)
        try:
            with _Drawing() as drawing, selected:
                result = call(*args, **kwargs)
        except Exception:  # whatever the module raises for a part of its argument: it is not dealt out
            return None
        if drawing.draws or not isinstance(result, Tensor):
            return None
        results.append(result.detach())
    together, *apart = selections
    if selects_rows(together.sizes, [one.sizes for one in apart]):
        return None
    return _entries_in(results, entries, is_same)


def _entries_in(results: list[Tensor], entries: int, is_same: Callable[[Tensor, Tensor], bool]) -> Rows | None:
    whole, first, second = results
    if not whole.ndim == first.ndim == second.ndim:
        return None
    for dim in range(whole.ndim):
        sizes = [list(one.shape) for one in results]
        along = [size.pop(dim) for size in sizes]
        are_parts = along == [entries, entries // 2, entries - entries // 2] and sizes[0] == sizes[1] == sizes[2]
        if are_parts and is_same(torch.cat([first, second], dim), whole):
            return Rows(dim)
    return None


class _Drawing(TorchFunctionMode):
    """While active, notes whether anything may be drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.draws |= name in MAY_DRAW and not _leaves_out_nothing(name, args, kwargs)
        return func(*args, **kwargs)


def _leaves_out_nothing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a dropout is one by its name alone: outside of training, or with a probability of zero."""
    if name not in _PLACES_OF_PROBABILITY:
        return False
    place = _PLACES_OF_PROBABILITY[name]
    named = kwargs.get("p" if name == "dropout" else "dropout_p", 0.5 if name == "dropout" else 0.0)
    probability = args[place] if place < len(args) else named
    trains = kwargs.get("training", args[2] if len(args) > 2 else True) if name == "dropout" else True
    return not trains or not probability
