"""Arguments whose rows are all alike, for a trial that shows what becomes of rows that all go the same way.

Decides what they are. Must not know how a forward is tried (`trial/split_check.py`).

[Note: all to one expert]
An expert that takes as many tokens as it has capacity for drops none of a few tokens that go to several experts, so
that few rows alone and together give the same. Later in the training more go to one of them, and those at the end of
the batch are dropped. A forward that does so asks how many rows it has selected. Whoever asks that is tried a second
time with tokens that are all alike, which go to one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


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
