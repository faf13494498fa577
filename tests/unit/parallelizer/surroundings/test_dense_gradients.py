"""Gradients that a forward asks to be sparse are dense, with the same numbers, until the change is taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.surroundings import dense_gradients
from moreh_ap.patching import Patches

INDEX = torch.tensor([[1, 2, 1], [0, 4, 3]])


@pytest.mark.parametrize(
    "look_up",
    [
        lambda weight: F.embedding(INDEX, weight, padding_idx=2, sparse=True),
        lambda weight: F.embedding_bag(INDEX, weight, mode="mean", sparse=True),
        lambda weight: F.embedding_bag(INDEX, weight, mode="sum", sparse=True, per_sample_weights=INDEX + 0.5),
        lambda weight: torch.gather(weight, 0, INDEX, sparse_grad=True),
    ],
    ids=["embedding", "mean of bags", "weighted bags", "gather"],
)
def test_gradients_are_dense_and_the_same(look_up: Callable[[Tensor], Tensor]):
    def gradient() -> Tensor:
        weight = torch.arange(15.0).reshape(5, 3).requires_grad_()
        look_up(weight).square().sum().backward()
        assert weight.grad is not None
        return weight.grad

    sparse = gradient()
    patches = Patches()
    dense_gradients.install(patches)
    dense = gradient()
    patches.undo()
    assert (sparse.is_sparse, dense.is_sparse, gradient().is_sparse) == (True, False, True)
    assert torch.equal(dense, sparse.to_dense())
