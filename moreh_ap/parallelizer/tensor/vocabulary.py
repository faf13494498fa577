"""Embedding, head and cross-entropy whose vocabulary is split over the ranks of the tensor axis.

Decides how a rank with some rows of the vocabulary contributes to what all rows give. Must not know where in a model
these layers stand, or how they were found.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moreh_ap.parallelizer.loss.loss_targets import check_targets
from moreh_ap.parallelizer.tensor.crossing import Crossing
from moreh_ap.parallelizer.tensor.split_tensor import SplitTensor, computes, gather_split_tensors


def localize_padding(embedding: nn.Embedding, rows: tuple[int, int]) -> None:
    """Makes `padding_idx`, whose row gets no gradient, a row of this rank's, or none where it is on another rank."""
    start, stop = rows
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - start if start <= padding < stop else None


def embed(embedding: nn.Embedding, ids: Tensor, rows: tuple[int, int], crossing: Crossing) -> Tensor:
    """Returns the embeddings of any ids: ids of other ranks give zeros here, and the ranks add up.

    Args:
        embedding: The embedding, its weight already this rank's rows. Whatever its class does with the rows that were
            found must be linear, as a factor is.
        ids: Ids of the whole vocabulary, of any shape.
        rows: The rows of the vocabulary that are here: [start, stop).
        crossing: The ranks with the other rows.
    """
    start, stop = rows
    elsewhere = (ids < start) | (ids >= stop)
    found = type(embedding).forward(embedding, (ids - start).masked_fill(elsewhere, 0))
    return crossing.leave(found.masked_fill(elsewhere.unsqueeze(-1), 0))


def vocabulary_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, vocabulary: int, crossing: Crossing
) -> SplitTensor:
    """Returns the logits of the whole vocabulary, of which every rank has its own columns.

    Args:
        hidden: (..., hidden), whole on every rank.
        weight: This rank's rows of the head, (own vocabulary, hidden).
        bias: This rank's shard of the bias.
        vocabulary: Number of rows that all ranks have together.
        crossing: The ranks.
    """
    return SplitTensor.from_local(
        F.linear(crossing.enter(gather_split_tensors(hidden)), weight, bias), vocabulary, -1, crossing
    )


@computes(F.cross_entropy)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy` of split logits: the whole logits never exist on one device.

    What has no split form (targets that are probabilities, classes that are not the split dim, smoothing together with
    weights, the legacy arguments) is computed from the whole logits.
    """
    class_dim = 1 if input.ndim > 1 else 0
    splits_classes = isinstance(input, SplitTensor) and input.split_dim == class_dim
    legacy = size_average is not None or reduce is not None
    smoothed_and_weighted = label_smoothing > 0 and weight is not None
    if not splits_classes or legacy or target.is_floating_point() or smoothed_and_weighted:
        input, target, weight = gather_split_tensors((input, target, weight))
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    valid = target != ignore_index
    picked = target.where(valid, 0)
    check_targets(picked, input.shape[class_dim])
    losses = _SplitCrossEntropy.apply(input, picked, class_dim, label_smoothing)
    factors = valid.to(losses.dtype) if weight is None else weight[picked] * valid
    losses = torch.where(valid, losses * factors, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / factors.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """Minus the log-probability of the target class, for each target; two small all-reduces.

    Source: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
    """

    @staticmethod
    def forward(ctx: Any, logits: SplitTensor, target: Tensor, class_dim: int, smoothing: float) -> Tensor:
        crossing, classes = logits.crossing, logits.shape[class_dim]
        start, stop = crossing.shard_range(classes)
        scores = logits.local_shard.detach().movedim(class_dim, -1).float()  # (..., own classes)
        if logits.dtype == torch.float64:
            scores = logits.local_shard.detach().movedim(class_dim, -1)
        highest = scores.amax(-1) if stop > start else scores.new_full(target.shape, -torch.inf)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=crossing.group)
        scores = scores - highest.unsqueeze(-1)
        here = (target >= start) & (target < stop)
        local_target = (target - start).where(here, 0).unsqueeze(-1)
        own = scores.gather(-1, local_target).squeeze(-1) if stop > start else torch.zeros_like(highest)
        sums = [own.where(here, 0.0)]
        if smoothing > 0:
            sums.append(scores.sum(-1))
        exponentials = scores.exp_()
        totals = torch.stack([exponentials.sum(-1), *sums])
        dist.all_reduce(totals, group=crossing.group)
        log_total = totals[0].log()
        losses = log_total - totals[1]
        if smoothing > 0:
            losses = (1 - smoothing) * losses + smoothing * (log_total - totals[2] / classes)
        ctx.save_for_backward(exponentials.div_(totals[0].unsqueeze(-1)), local_target, here)
        ctx.class_dim, ctx.smoothing, ctx.classes = class_dim, smoothing, classes
        ctx.crossing, ctx.dtype = crossing, logits.dtype
        return losses if torch.is_autocast_enabled(losses.device.type) else losses.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        probabilities, local_target, here = ctx.saved_tensors
        wanted = here.unsqueeze(-1).to(probabilities.dtype) * (1 - ctx.smoothing)
        scores_grad = probabilities - ctx.smoothing / ctx.classes if ctx.smoothing else probabilities.clone()
        if scores_grad.shape[-1]:
            scores_grad.scatter_add_(-1, local_target, -wanted)
        scores_grad = (scores_grad * grad.unsqueeze(-1)).to(ctx.dtype).movedim(-1, ctx.class_dim)
        return SplitTensor(scores_grad, ctx.classes, ctx.class_dim, ctx.crossing), None, None, None
