"""Embeddings whose rows a forward renormalises before it looks them up (`max_norm`), where workers share a batch.

Decides which rows are renormalised: those that any worker looks up, on every worker, so that all copies of the weight
stay equal. Must not know models, plans or how a batch was cut.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moreh_ap.parallelizer.mesh import Axis

_SIGNATURES = {func: inspect.signature(func) for func in (F.embedding, F.embedding_bag)}


def with_norms_of_batch(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], axis: Axis
) -> inspect.BoundArguments:
    """Renormalises what the workers look up, and returns the arguments of a function that renormalises nothing.

    A collective: one sum of as many bytes as the embedding has rows.

    Args:
        func: `torch.nn.functional.embedding` or `embedding_bag`.
        args: Its positional arguments, with a `max_norm`.
        kwargs: Its keyword arguments, likewise.
        axis: The workers that share the batch.
    """
    call = _SIGNATURES[func].bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    _renormalise(given["weight"], given["input"], given["max_norm"], given["norm_type"], axis)
    given["max_norm"] = None
    return call


@torch.no_grad()
def _renormalise(weight_VD: Tensor, index: Tensor, max_norm: float, norm_type: float, axis: Axis) -> None:
    is_seen_V = torch.zeros(weight_VD.shape[0], dtype=torch.uint8, device=weight_VD.device)
    is_seen_V[index.flatten()] = 1
    dist.all_reduce(is_seen_V, op=dist.ReduceOp.MAX, group=axis.group)
    torch.embedding_renorm_(weight_VD.detach(), is_seen_V.nonzero().squeeze(1), max_norm, norm_type)
