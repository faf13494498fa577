"""Targets of losses over classes: that each is a class.

Must not know how a loss is computed.
"""

from __future__ import annotations

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
