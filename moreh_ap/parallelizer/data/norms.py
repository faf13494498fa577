"""The norm over tensors of which workers hold shards.

Decides that every element counts once, wherever copies of it are. Must not know what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moreh_ap.errors import UnsupportedError


def total_norm(shards: Sequence[Tensor], order: float, device: torch.device, num_workers: int) -> Tensor:
    """Returns the norm of all elements that workers hold together, as a tensor without dims. A collective.

    Args:
        shards: This worker's shards, without those whose elements another worker counts.
        order: The order of the norm, above 0, or infinity.
        device: Where the result is wanted.
        num_workers: How many workers there are.

    Raises:
        UnsupportedError: The order is not above 0.
    """
    if not order > 0:
        raise UnsupportedError(f"a norm of order {order} over all devices", "orders above 0, or inf", "norm_type=2.0")
    dtype = torch.promote_types(shards[0].dtype.to_real(), torch.float32) if shards else torch.float32
    counted = [one.detach().abs() if one.is_complex() else one.detach() for one in shards if one.numel()]
    found = list(torch._foreach_norm(counted, order, dtype=dtype)) if counted else []
    if device.type != "cpu" and any(one.is_cpu for one in found):  # gradients may be in host memory, and some elsewhere
        found = [one.to(device) for one in found]
    norms = torch.stack(found or [torch.zeros((), dtype=dtype, device=device)])
    norm = torch.linalg.vector_norm(norms, order).to(device)
    if num_workers == 1:
        return norm
    if math.isinf(order):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX)
        return norm
    powered = norm.to(torch.float64) ** order
    dist.all_reduce(powered)
    return (powered ** (1.0 / order)).to(dtype)
