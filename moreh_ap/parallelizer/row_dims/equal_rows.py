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

from torch import Tensor


def with_equal_rows(leaves: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    """Returns arguments with the first entry of each tensor that has rows everywhere in it.

    Args:
        leaves: The arguments. Entries are vectors along the last dim of floating-point tensors with other dims than
            that of the rows, and numbers otherwise; marks, which are 0 and 1, stay as they are.
        dims: Where each has rows; None: nowhere.
    """
    return [leaf if dim is None else _equal(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]


def _equal(leaf: Tensor, dim: int) -> Tensor:
    if leaf.numel() == 0 or bool(((leaf == 0) | (leaf == 1)).all()):
        return leaf
    is_last = dim % leaf.ndim == leaf.ndim - 1
    vectors = leaf.detach() if leaf.is_floating_point() and not is_last else leaf.detach().unsqueeze(-1)
    first = vectors.reshape(-1, vectors.shape[-1])[0]
    return first.expand_as(vectors).clone().view(leaf.shape)
