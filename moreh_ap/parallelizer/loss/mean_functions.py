"""Functions of PyTorch whose results depend on all rows of a batch in a known way: means, counts, extremes, statistics.

Must not know what is made of that (`loss_reduction.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
LOSSES = CLASS_LOSSES | ELEMENT_LOSSES
WEIGHTED_MEANS = {F.mse_loss, F.l1_loss}  # their weighted mean divides by the sum of weights, others by the count
MEANS = {torch.mean, Tensor.mean}
COUNTS = {torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero}
PADS = torch._VF._pad_packed_sequence  # what `torch.nn.utils.rnn.pad_packed_sequence` calls
SMALLEST = {torch.min, Tensor.min, torch.amin, Tensor.amin}
BOTH = {torch.aminmax, Tensor.aminmax}
EXTREMES = {torch.max, Tensor.max, torch.amax, Tensor.amax} | SMALLEST
OBSERVED = EXTREMES | BOTH
OBSERVES: Any = torch.fused_moving_avg_obs_fake_quant
"""Quantizes, and has the extremes of its input in running ones."""
EMBEDS = frozenset({F.embedding, F.embedding_bag})
NORMALISES = EMBEDS | {F.batch_norm, F.instance_norm, OBSERVES}
"""Functions that may take something of all rows; see `takes_statistics`."""
_SUMS, _ANY = {torch.sum, Tensor.sum}, {torch.any, Tensor.any}
LOADS = _SUMS | _ANY
"""Functions that may say how many rows go somewhere; see `is_load`."""
_READ_ONE = {Tensor.item, Tensor.__int__, Tensor.__index__}
_DIVIDE_ONE_BY: set[Any] = {Tensor.__rdiv__, Tensor.reciprocal, Tensor.reciprocal_, torch.reciprocal}  # type: ignore[attr-defined]
_DIVIDE = {
    Tensor.div, Tensor.div_, Tensor.divide, Tensor.divide_, Tensor.true_divide, Tensor.true_divide_,
    torch.div, torch.divide, torch.true_divide,
}  # fmt: skip
DIVISIONS = _READ_ONE | _DIVIDE_ONE_BY | _DIVIDE
"""Functions that may divide by a number that a forward has counted; see `may_divide`."""


def is_extreme(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a maximum or minimum is that of all whole numbers in a tensor: of lengths, of labels."""
    value = args[0] if len(args) == 1 and not kwargs else None
    if not isinstance(value, Tensor) or value.ndim == 0 or value.dtype is torch.bool:
        return False
    return not value.is_floating_point() and not value.is_complex()


def is_observed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether maxima or minima are those of all fractions in a tensor, or of each channel, without a gradient:
    what an observer of a quantization sees. Parameters are on every worker."""
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim == 0:
        return False
    if isinstance(value, nn.Parameter) or (value.requires_grad and torch.is_grad_enabled()):
        return False
    return func in BOTH or (len(args) == 1 and not kwargs)


def is_constant(value: Tensor) -> bool:
    """Says whether a tensor has whole numbers and no gradient: choices of rows, as ones and zeros. Reads it, where it
    has values: none of a forward that is followed on meta, or with fake tensors, is said to be a constant."""
    may_be_read = type(value) is Tensor and not value.is_meta and value.is_floating_point()
    return may_be_read and not value.requires_grad and bool((value == value.round()).all())


def is_load(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a result may tell how many rows go to each of several experts, or whether any goes to one: sums of
    whole numbers over some dims, and whether a mask is true anywhere."""
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or value.ndim == 0 or value.is_floating_point() or value.is_complex():
        return False
    if func in _ANY and len(args) == 1 and not kwargs:
        return value.dtype is torch.bool
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    return value.ndim > 1 and (isinstance(dim, int) or (isinstance(dim, (tuple, list)) and 0 < len(dim) < value.ndim))


def takes_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a normalisation takes statistics of its input into its result or into running ones, or which rows of
    an embedding it renormalises."""
    if func in EMBEDS:
        return kwargs.get("max_norm", args[3] if len(args) > 3 else None) is not None
    if func is OBSERVES:
        return not isinstance(args[0], nn.Parameter) and (args[1].device.type == "cuda" or bool(args[1]))
    if func is F.batch_norm:
        return bool(kwargs.get("training", args[5] if len(args) > 5 else False))
    running = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
    return running is not None and bool(kwargs.get("use_input_stats", args[5] if len(args) > 5 else True))


def may_divide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a function divides by numbers without a gradient, or gives Python a whole one to divide by."""
    if func in _READ_ONE:
        return not args[0].is_floating_point()
    divisor = args[0] if func in _DIVIDE_ONE_BY else args[1] if len(args) > 1 else kwargs.get("other")
    return isinstance(divisor, Tensor) and not divisor.requires_grad


def summed_in(values: Tensor) -> torch.dtype | None:
    """Returns the dtype in which numbers are summed for a mean, which PyTorch rounds once; None for their own."""
    return torch.float32 if values.dtype in (torch.bfloat16, torch.float16) else None
