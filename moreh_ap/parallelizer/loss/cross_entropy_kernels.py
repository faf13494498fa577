"""Cross-entropy over many logits on a GPU, in two Triton kernels that read each logit once.

Decides how rows are spread over a GPU. Must not know which losses come here, or how they are reduced. Imports Triton,
which PyTorch brings along where it is built for GPUs: import it there only.

[Note: one pass each]
Chunks of rows by PyTorch's own operations (`chunked_cross_entropy.py`) move about 66 bytes of memory a logit in
bfloat16: a float32 copy, its largest, its exponentials, their sum, and as many in the backward. Here the forward reads
2 and the backward reads 2 and writes 2. Sums are float32, as there. The sum of exponentials is brought to a new
maximum as it goes, block by block: Milakov and Gimelshein, "Online normalizer calculation for softmax",
https://arxiv.org/abs/1805.02867, algorithm 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""How many logits of a row a program has in registers at a time."""
_WARPS = 8


def row_losses(logits: Tensor, target: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row, and the logarithm of the sum of its exponentials.

    Args:
        logits: (rows, classes) in float32, bfloat16 or float16, on a GPU.
        target: (rows,), class numbers.
        smoothing: Part of the probability that all classes share.

    Returns:
        Two tensors of (rows,) in float32.
    """
    logits = _in_rows(logits)
    losses, totals = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(2))
    if len(logits):
        _forward[(len(logits),)](
            *(logits, target.contiguous(), losses, totals, logits.shape[1], logits.stride(0), smoothing),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return losses, totals


def gradient(logits: Tensor, target: Tensor, totals: Tensor, grad: Tensor, smoothing: float) -> Tensor:
    """Returns the gradient with respect to the logits, in their dtype.

    Args:
        logits, target, smoothing: As for `row_losses`.
        totals: (rows,), what it returned second.
        grad: (rows,), the gradient with respect to the losses.
    """
    logits = _in_rows(logits)
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if len(logits):
        blocks = triton.cdiv(logits.shape[1], _BLOCK)
        _backward[(len(logits), blocks)](
            *(logits, target.contiguous(), totals, grad.contiguous(), result),
            *(logits.shape[1], logits.stride(0), smoothing),
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return result


def _in_rows(logits: Tensor) -> Tensor:
    """Returns logits whose rows are each in one piece."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


@triton.jit
def _forward(
    logits,
    target,
    losses,
    totals,
    num_classes,
    row_stride,
    smoothing,
    BLOCK: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    scores_at = logits + row * row_stride
    largest = -float("inf")
    total = 0.0
    plain = 0.0
    for first in range(0, num_classes, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        is_class = columns < num_classes
        scores = tl.load(scores_at + columns, mask=is_class, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(scores, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)  # all are -inf so far: their exponentials are 0
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(scores - shift), 0)
        largest = new
        if smoothing > 0:
            plain += tl.sum(tl.where(is_class, scores, 0.0), 0)
    total = largest + tl.log(total)
    wanted = tl.load(scores_at + tl.load(target + row)).to(tl.float32)
    if smoothing > 0:
        wanted = (1 - smoothing) * wanted + smoothing * (plain / num_classes)
    tl.store(totals + row, total)
    tl.store(losses + row, total - wanted)


@triton.jit
def _backward(
    logits,
    target,
    totals,
    grad,
    result,
    num_classes,
    row_stride,
    smoothing,
    BLOCK: tl.constexpr,
):
    """One program a block of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_class = columns < num_classes
    scores = tl.load(logits + row * row_stride + columns, mask=is_class, other=0.0).to(tl.float32)
    difference = tl.exp(scores - tl.load(totals + row)) - smoothing / num_classes
    difference -= tl.where(columns == tl.load(target + row), 1 - smoothing, 0.0)
    difference *= tl.load(grad + row)
    tl.store(result + row * num_classes + columns, difference.to(result.dtype.element_ty), mask=is_class)
