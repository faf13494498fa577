"""Properties of a call of a torch function: its name, whether it only queries a tensor, the leaves of its arguments.

Decides in which order leaves are counted. Must not know rows or what is done with a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GETTERS_OF_TENSORS = {"T", "mT", "H", "mH", "data", "real", "imag"}
_QUESTIONS = {"size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "__len__"}
_QUESTIONS |= {
    "untyped_storage",
    "storage_offset",
    "register_hook",
    "retain_grad",
    "requires_grad_",
    "data_ptr",
    "__hash__",
    "has_names",
    "_set_grad_enabled",
    "_record_function_enter_new",
    "_record_function_exit",
    "_record_function_exit._RecordFunction",
}


def is_question(func: Callable[..., Any]) -> bool:
    """Says whether a torch function queries, or sets, a property of a tensor that does not depend on its entries."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _GETTERS_OF_TENSORS
    return name in _QUESTIONS or (name.startswith("is_") and name != "is_nonzero")


def asks_for_sizes(func: Callable[..., Any], *, counts: bool = False) -> bool:
    """Says whether a torch function returns the shape of a tensor, or one size of it; or, if `counts`, its number of
    entries."""
    name = getattr(func, "__name__", "")
    if counts and name in ("numel", "nelement", "__len__"):
        return True
    return name == "size" or (name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "shape")


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns arguments of a torch function with `function` applied to each leaf, in a fixed order."""
    if isinstance(value, slice):
        return slice(*(map_leaves(function, one) for one in (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return tuple(map_leaves(function, one) for one in value)
    if is_repeated(value):  # one tensor as many times as the batch has rows: two leaves, however many rows those are
        once, times = map_leaves(function, value[0]), function(len(value))
        return [once] * times
    if isinstance(value, (list, tuple)):
        mapped = [map_leaves(function, one) for one in value]
        kind = type(value)
        is_named = issubclass(kind, tuple) and kind is not tuple and kind.__module__ != "torch.return_types"
        return kind(*mapped) if is_named else kind(mapped)
    if isinstance(value, dict):
        return {key: map_leaves(function, one) for key, one in value.items()}
    return function(value)


def is_repeated(value: Any) -> bool:
    """Says whether a list holds one tensor and nothing else, as in ``torch.cat([x] * rows)``."""
    if type(value) is not list or not value or not isinstance(value[0], Tensor):
        return False
    return all(one is value[0] for one in value)


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves in the order of `map_leaves`."""
    found: list[Any] = []

    def find(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    map_leaves(find, value)
    return found


def tensors_of(result: Any) -> list[Tensor]:
    """Returns the tensors in the result of a torch function."""
    return [leaf for leaf in leaves_of(result) if isinstance(leaf, Tensor)]


def names(*lines: str) -> frozenset[str]:
    """Returns the names of functions that stand in lines, between spaces."""
    return frozenset(" ".join(lines).split())


def function_name(func: Callable[..., Any]) -> str:
    """Returns the name of a torch function; for a getter or setter, with the name of the attribute."""
    name = getattr(func, "__name__", type(func).__name__)
    owner = getattr(getattr(func, "__self__", None), "__name__", "")
    return f"{owner}.{name}" if name in ("__get__", "__set__") else name
