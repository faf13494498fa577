"""Arguments whose rows are all alike, for a trial that shows what becomes of rows that all go the same way.

Decides what they are. Must not know how a forward is tried (`trial/split_check.py`).

[Note: all to one expert]
An expert that takes as many tokens as it has capacity for drops none of a few tokens that go to several experts, so
that few rows alone and together give the same. Later in the training more go to one of them, and those at the end of
the batch are dropped. A forward that does so asks how many rows it has selected. Whoever asks that is tried a second
time with tokens that are all alike, which go to one expert.

[Note: copies of a row]
Where one of a few rows counts and the others do not (``(losses * mask).sum() / mask.sum().clamp(min=1)``), the sum of
what they give one by one is what they give together, whatever it is divided by. So a forward that divides by a number
is tried with copies of each of them: if one copy counts, all do. It is not where a normalisation takes statistics:
those of copies have no variance, and what it makes of them is rounding.

[Note: masks of other rows]
It may be that none of a few rows counts (``mask = x > 5``, ``weights = (x - 5).relu()``). So it is also tried with
masks that are true everywhere and weights of which none is zero, among the arguments too: rows that depend on each
other with some masks may do so with others. Masks that are false everywhere would leave attention nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moreh_ap.parallelizer.observation.torch_calls import names

_MAKE_MASKS = names("lt le gt ge eq ne less greater less_equal greater_equal not_equal isfinite")
_CUT_OFF = names("relu relu6 clamp clip clamp_min threshold hardtanh")
"""Functions that make weights of rows, of which most may be zero."""


def with_equal_rows(leaves: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns arguments with one entry of each tensor that has rows everywhere in it.

    Args:
        leaves: The arguments. In floating-point tensors the entry is the first vector along the last dim, or the first
            number if rows lie along that; in others the largest number, since small ones mark what does not count.
            Marks, which are 0 and 1, and what is not finite stay as they are.
        dims: Where each has rows; None: nowhere.
    """
    return [leaf if dim is None else _equal(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]


def _equal(leaf: Tensor, dim: int) -> Tensor:
    leaf = leaf.detach()
    if leaf.numel() == 0 or leaf.is_complex() or bool(((leaf == 0) | (leaf == 1)).all()):
        return leaf
    if not leaf.is_floating_point():
        return torch.full_like(leaf, int(leaf.max()))
    if not bool(leaf.isfinite().all()):
        return leaf
    is_last = dim % leaf.ndim == leaf.ndim - 1
    vectors = leaf.unsqueeze(-1) if is_last else leaf
    first = vectors.reshape(-1, vectors.shape[-1])[0]
    return first.expand_as(vectors).clone().view(leaf.shape)


def with_marks(leaves: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns arguments whose marks, which are 0 and 1, and weights of rows all count: none of them is zero."""
    return [leaf if dim is None else _marked(leaf) for leaf, dim in zip(leaves, dims, strict=True)]


def _marked(leaf: Tensor) -> Tensor:
    may_be_weights = leaf.is_floating_point() or leaf.dtype is torch.bool or bool(((leaf == 0) | (leaf == 1)).all())
    return leaf.detach().masked_fill(leaf == 0, 1) if may_be_weights else leaf


def true_masks() -> AbstractContextManager[Any]:
    """Returns what makes comparisons of tensors true everywhere while active, and weights not zero."""
    return _TrueMasks()


class _TrueMasks(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "").strip("_")
        if not isinstance(result, Tensor) or not result.ndim:
            return result
        if name in _CUT_OFF and result.is_floating_point():
            return result.masked_fill(result == 0, 1)
        return torch.full_like(result, True) if name in _MAKE_MASKS and result.dtype is torch.bool else result
