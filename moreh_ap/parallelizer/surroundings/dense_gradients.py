"""Gradients that PyTorch makes sparse, dense in a worker.

A forward may ask for sparse gradients: `nn.Embedding(sparse=True)`, `F.embedding_bag(..., sparse=True)`,
`torch.gather(..., sparse_grad=True)`. What sums gradients over workers, FSDP2 and norms take dense ones; optimizers
that take both do the same with them. Decides what PyTorch's own kernels of such gradients return. They run for no other
ones, so models without them lose no time. Must not know models, batches or plans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have gradients of embeddings and of `gather` be dense."""
    group = patches.group("Gradients that are summed over workers are dense.")
    libraries = [torch.library.Library("aten", "IMPL")]  # in force until it is let go
    for name, kernel in (("embedding_sparse_backward", _of_embedding), ("_gather_sparse_backward", _of_gather)):
        for key in ("CPU", "CUDA"):
            libraries[0].impl(name, kernel, key)
        group.note(f"torch.ops.aten.{name}", "Returns a dense gradient.", libraries.clear)


def _of_embedding(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    """Returns the gradient of the weight, (num_weights, D); `grad` is that of what was looked up, (..., D)."""
    return torch.ops.aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)


def _of_gather(value: Tensor, dim: int, index: Tensor, grad: Tensor) -> Tensor:
    """Returns the gradient of `value`, from that of the elements that were taken, which has the shape of `index`."""
    return torch.zeros_like(value).scatter_add_(dim, index, grad)
