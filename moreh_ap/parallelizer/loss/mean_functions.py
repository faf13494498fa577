"""Functions of PyTorch whose results depend on all rows of a batch in a known way: means, counts, extremes.

Must not know what is made of that (`loss_reduction.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CLASS_LOSSES = {F.cross_entropy, F.nll_loss}
ELEMENT_LOSSES = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
    F.soft_margin_loss,
    F.margin_ranking_loss,
    F.hinge_embedding_loss,
    F.cosine_embedding_loss,
    F.triplet_margin_loss,
    F.multi_margin_loss,
    F.multilabel_margin_loss,
    F.multilabel_soft_margin_loss,
    F.ctc_loss,
}
WEIGHTED_MEANS = {F.mse_loss, F.l1_loss}  # their weighted mean divides by the sum of weights, others by the count
MEANS = {torch.mean, Tensor.mean}
COUNTS = {torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero}
PADS = torch._VF._pad_packed_sequence  # what `torch.nn.utils.rnn.pad_packed_sequence` calls
SMALLEST = {torch.min, Tensor.min, torch.amin, Tensor.amin}
EXTREMES = {torch.max, Tensor.max, torch.amax, Tensor.amax} | SMALLEST


def is_extreme(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a maximum or minimum is that of all whole numbers in a tensor: of lengths, of labels."""
    value = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(value, Tensor) or value.ndim == 0 or value.dtype is torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()
