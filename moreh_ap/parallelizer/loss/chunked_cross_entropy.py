"""Cross-entropy over many logits, a few rows at a time.

Decides when PyTorch's own cross-entropy would make too large copies, and computes it without them. Must not know
models, plans, or which worker has which rows.

[Note: copies]
PyTorch keeps the log-probabilities of all rows from forward to backward, in float32 under autocast, and makes their
gradient in float32 as well; transformers converts the logits to float32 before. For 8,192 tokens and a vocabulary of
128,256 each of these copies takes 3.9 GiB. Here forward keeps one number for each row, the logarithm of the sum of
exponentials, and backward writes the gradient in the precision of the logits; float32 is there for one chunk of rows at
a time. Compare Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models",
https://arxiv.org/abs/2411.09009, section 4, which does without logits too; here they are a result of the model. On a
GPU two kernels do both (`cross_entropy_kernels.py`) where Triton runs, and no chunk is made.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from moreh_ap.integrations import transformers_losses
from moreh_ap.local import logger
from moreh_ap.parallelizer.loss.loss_targets import check_targets
from moreh_ap.patching import Patches, PatchGroup

LEAST_ELEMENTS = {"cpu": 2**22, "cuda": 2**25}
"""How many logits are taken in chunks. On GPUs a float32 copy of fewer takes less than 128 MiB, and PyTorch's function
is one kernel. The planner knows these numbers."""
LEAST_CLASSES = 2**13
"""How many classes make a vocabulary: a model with fewer is left alone. The planner knows this number too."""
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**24}
"""About how many logits are in a chunk: on a CPU, as many as its caches hold."""

_GROUPS: list[PatchGroup] = []  # where changes are noted, in a worker
_REPLACED: list[Callable[..., Tensor]] = []  # PyTorch's own function, while it is replaced

_NONE, _MEAN = 0, 1  # as `torch.nn._reduction` numbers them
_IN_CHUNKS = (torch.float32, torch.bfloat16, torch.float16)


def install(patches: Patches) -> None:
    """Lets `use_for` make its changes, to be taken back with the others."""
    _GROUPS.append(patches.group("Losses over a vocabulary are computed without float32 copies of the logits."))
    patches.on_undo(_GROUPS.clear)
    patches.on_undo(_REPLACED.clear)


def use_for(module: nn.Module) -> None:
    """Has losses take many logits in chunks from now on, if a model has a vocabulary.

    Args:
        module: The model; its parameters may be on meta.
    """
    if _REPLACED or not any(param.ndim == 2 and max(param.shape) >= LEAST_CLASSES for param in module.parameters()):
        return
    (group,) = _GROUPS
    effect = "Takes many logits in chunks of rows."
    _REPLACED.append(torch._C._nn.cross_entropy_loss)
    group.replace(torch._C._nn, "cross_entropy_loss", _cross_entropy_loss, effect)
    transformers_losses.surround(group, _surroundings)


def _cross_entropy_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Stands in for ``torch._C._nn.cross_entropy_loss``, which `torch.nn.functional.cross_entropy` calls."""
    if not are_many(logits) or not _can_be_chunked(logits, target, weight):
        (original,) = _REPLACED
        return original(logits, target, weight, reduction, ignore_index, label_smoothing)
    return chunked_cross_entropy(logits, target, reduction, ignore_index, label_smoothing)


def are_many(logits: Tensor) -> bool:
    """Says whether logits are taken in chunks, by their number alone."""
    return logits.numel() >= LEAST_ELEMENTS.get(logits.device.type, math.inf)


def _can_be_chunked(logits: Tensor, target: Tensor, weight: Tensor | None) -> bool:
    """Says whether these are rows of logits on a device, each with the number of a class."""
    has_rows = logits.ndim == 2 and target.shape == logits.shape[:1] and target.dtype == torch.int64
    return has_rows and weight is None and not isinstance(logits, DTensor) and logits.dtype in _IN_CHUNKS


@contextmanager
def _surroundings(logits: Tensor) -> Iterator[None]:
    """Inside, a loss that would convert many logits to float32 gets them as they are, and is float32 nevertheless."""
    if not are_many(logits) or logits.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    with _InOwnPrecision(), torch.autocast(logits.device.type, dtype=logits.dtype):
        yield


def chunked_cross_entropy(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Returns the cross-entropy of rows of logits, in float32 under autocast, else in their dtype.

    Args:
        logits: (rows, classes).
        target: (rows,), class numbers.
        reduction: 0 for the losses of all rows, 1 for their mean over rows that count, 2 for their sum.
        ignore_index: The target of rows that do not count.
        label_smoothing: Part of the probability that all classes share.

    Raises:
        IndexError: A target is no class (on the CPU; on a GPU the device raises it).
    """
    valid = target != ignore_index
    picked = target.where(valid, 0)
    check_targets(picked, logits.shape[1])
    losses = _ChunkedCrossEntropy.apply(logits, picked, label_smoothing)
    losses = torch.where(valid, losses, 0.0)
    if reduction == _MEAN:
        result = losses.sum() / valid.sum()
    else:
        result = losses if reduction == _NONE else losses.sum()
    return result if torch.is_autocast_enabled(logits.device.type) else result.to(logits.dtype)


def row_chunks(num_rows: int, num_classes: int, device_type: str) -> Iterator[slice]:
    """Yields the rows of each chunk of logits of (rows, classes)."""
    rows = max(1, CHUNK_ELEMENTS[device_type] // num_classes)
    return (slice(start, start + rows) for start in range(0, num_rows, rows))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The loss of each row in float32. See [Note: copies]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
        ctx.smoothing = smoothing
        if kernels := _kernels(logits.device.type):
            losses, totals = kernels.row_losses(logits, target, smoothing)
            ctx.save_for_backward(logits, target, totals)
            return losses
        totals = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        losses = torch.empty_like(totals)
        for rows in row_chunks(len(logits), logits.shape[1], logits.device.type):
            scores = logits[rows].float()
            total = torch.logsumexp(scores, -1)
            wanted = scores.gather(-1, target[rows, None]).squeeze(-1)
            if smoothing > 0:
                wanted = (1 - smoothing) * wanted + smoothing * scores.mean(-1)
            totals[rows], losses[rows] = total, total - wanted
        ctx.save_for_backward(logits, target, totals)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, target, totals = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            return _differentiable(logits, target, ctx.smoothing, grad), None, None
        if kernels := _kernels(logits.device.type):
            return kernels.gradient(logits, target, totals, grad, ctx.smoothing), None, None
        result = torch.empty_like(logits)
        for rows in row_chunks(len(logits), logits.shape[1], logits.device.type):
            scores = (logits[rows].float() - totals[rows, None]).exp_()
            if ctx.smoothing > 0:
                scores.sub_(ctx.smoothing / logits.shape[1])
            scores.scatter_add_(-1, target[rows, None], scores.new_full((len(scores), 1), ctx.smoothing - 1))
            result[rows] = scores.mul_(grad[rows, None])
        return result, None, None


@functools.cache
def _kernels(device_type: str) -> ModuleType | None:
    """Returns the module of the kernels for a type of devices; None if there are none that run here."""
    if device_type != "cuda":
        return None
    try:
        from moreh_ap.parallelizer.loss import cross_entropy_kernels

        sample = torch.zeros(1, 2, dtype=torch.bfloat16, device=device_type)
        cross_entropy_kernels.row_losses(sample, torch.zeros(1, dtype=torch.int64, device=device_type), 0.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of any class: Triton is not there, has no compiler, or does not know the GPU
        logger.say(f"losses over a vocabulary are computed in chunks of rows, as Triton does not run here: {error}")
        return None
    return cross_entropy_kernels


def _differentiable(logits: Tensor, target: Tensor, smoothing: float, grad: Tensor) -> Tensor:
    """Returns the gradient with respect to the logits by operations that autograd can differentiate."""
    probabilities = logits.float().softmax(-1)
    wanted = torch.full_like(probabilities, smoothing / logits.shape[1])
    wanted.scatter_add_(-1, target[:, None], wanted.new_full((len(target), 1), 1 - smoothing))
    return ((probabilities - wanted) * grad[:, None]).to(logits.dtype)


class _InOwnPrecision(TorchFunctionMode):
    """While active, `Tensor.float` leaves many logits as they are: the loss makes each chunk float32 by itself."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and are_many(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))
