"""In which precision the result of a model stays that computes in another one than its parameters'.

Decides which tensors of a result are converted at once. Must not know how a model came to compute in that precision, or
who reads a result.

[Note: promised]
A script that gives a model float32 parameters gets float32 results, under a plan that computes in bfloat16 too. The
logits of a language model are most of its result, and seldom read: in float32 they would take 4 bytes a logit on every
device until the step ends. So a tensor of which every row is large stays as it was computed. In the script its dtype is
float32, and a command that reads it, or computes with it, converts what it takes. A loss and other small results are
converted at once. Which tensors stay depends on the size of a row alone, so all workers decide alike.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

LEAST_ROW_ELEMENTS = 2**12
"""From how many elements in each entry of dim 0 on a tensor stays as it was computed: 16 KiB in float32, with which no
value travels in an answer (`MAX_INLINE_BYTES` in `protocol/messages/tensors.py`)."""

PROMISES = "_moreh_promises"
"""The attribute of a model that has such a hook: results of others are not looked at."""

_PROMISED = "_moreh_promised"  # the attribute of a tensor that stays: the dtype that its readers get


def results_in(computed: torch.dtype, promised: torch.dtype) -> Callable[[nn.Module, Any, Any], Any]:
    """Returns a forward hook for a model that computes in one dtype and promises another. See [Note: promised]."""
    return lambda module, args, result: as_promised(result, computed, promised)


def as_promised(result: Any, computed: torch.dtype, promised: torch.dtype) -> Any:
    """Returns a result with its floating-point tensors in the promised dtype, but for large ones, which are marked.

    Args:
        result: A tensor, or tensors in tuples, lists, dicts and dataclasses; what other objects hold stays.
        computed: The dtype in which the model computes; tensors of other dtypes are converted, large ones too.
        promised: The dtype that the script gets.
    """

    def convert(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point() or leaf.dtype == promised:
            return leaf
        if leaf.dtype != computed or leaf.ndim < 2 or leaf.shape[1:].numel() < LEAST_ROW_ELEMENTS:
            return leaf.to(promised)
        setattr(leaf, _PROMISED, promised)
        return leaf

    return converted(result, convert)


def all_converted(result: Any) -> Any:
    """Returns a result in which no tensor is left in another precision than promised."""
    return converted(result, lambda leaf: leaf.to(leaf.__dict__[_PROMISED]) if _PROMISED in leaf.__dict__ else leaf)


def shapes_of(leaves: Sequence[Any], detached: Sequence[Any]) -> Sequence[Any]:
    """Returns the leaves of a result for their shapes and promised dtypes.

    Args:
        leaves: The leaves with their history.
        detached: The same without, which serve where nothing else is promised.
    """
    if not any(_PROMISED in leaf.__dict__ for leaf in leaves if isinstance(leaf, Tensor)):
        return detached
    return list(map(_shape_of, leaves, detached))


def _shape_of(leaf: Any, detached: Any) -> Any:
    promised = getattr(leaf, _PROMISED, None)
    if promised is None:
        return detached
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=promised, device="meta")


def converted(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Returns `value` with its tensors converted; containers in which nothing changes stay the same objects."""
    if isinstance(value, Tensor):
        return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before: dict[Any, Any] = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    elif isinstance(value, dict):
        before = dict(value)
    elif isinstance(value, (list, tuple)):
        before = dict(enumerate(value))
    else:
        return value
    after = {key: converted(one, convert) for key, one in before.items()}
    if all(after[key] is one for key, one in before.items()):
        return value
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **after)  # type: ignore[type-var]
    if isinstance(value, dict):
        filled = copy.copy(value)  # of a class of its own, perhaps
        filled.update(after)
        return filled
    takes_one_argument = isinstance(value, list) or type(value).__module__ in ("builtins", "torch.return_types")
    return type(value)(after.values()) if takes_one_argument else type(value)(*after.values())
