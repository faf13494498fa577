"""Targets of losses over classes: that each is a class, and by how many of them a mean divides.

Must not know how a loss is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_targets(target: Tensor, classes: int) -> None:
    """Raises what PyTorch's losses raise for a target that is no class; on a GPU this does not wait for the device.

    Args:
        target: Class numbers, of any shape.
        classes: How many there are.

    Raises:
        IndexError: One is no class, on the CPU.
    """
    out_of_range = (target < 0) | (target >= classes)
    if target.device.type == "cpu" and bool(out_of_range.any()):
        raise IndexError(f"Target {int(target[out_of_range].reshape(-1)[0])} is out of bounds.")
    if target.device.type != "cpu":
        torch._assert_async(~out_of_range.any())


def count_targets(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor | int:
    """Returns by what the mean of a class loss is divided.

    Source: PyTorch documentation of CrossEntropyLoss and NLLLoss, parameter `reduction`.
    """
    if target.is_floating_point():  # class probabilities: one row each, weights and ignore_index do not count
        class_dim = 1 if scores.ndim > 1 else 0
        return scores.numel() // scores.shape[class_dim]
    valid = target != ignore_index
    if weight is None:
        return valid.sum()
    return torch.where(valid, weight.detach()[target.where(valid, 0)], 0).sum()


def is_count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Says whether a sum is the number of true elements of a whole mask."""
    value = args[0] if args else kwargs.get("input")
    if not isinstance(value, Tensor) or value.dtype is not torch.bool or value.ndim == 0:
        return False
    return len(args) == 1 and not {"dim", "axis", "keepdim", "out"} & kwargs.keys()
