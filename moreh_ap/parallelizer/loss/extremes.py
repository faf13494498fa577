"""The largest and smallest numbers of a batch, given those of a worker's rows.

Decides how functions give them. Must not know how workers exchange numbers (`loss_reduction.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.parallelizer.loss.mean_functions import SMALLEST


def extreme_of(func: Callable[..., Any], own: Any, largest: Callable[[Tensor], Tensor]) -> Any:
    """Returns what a function of maxima or minima gives for the batch.

    Args:
        func: The function.
        own: What it gives for these rows: a number, or the minima and maxima of `torch.aminmax`.
        largest: Returns the largest of a worker's numbers, in float64, over all workers. A collective.
    """
    if isinstance(own, Tensor):
        sign = -1 if func in SMALLEST else 1
        return (sign * largest(sign * own.to(torch.float64))).to(own.dtype)
    both = largest(torch.stack([-own.min, own.max]).to(torch.float64)).to(own.max.dtype)
    return torch.return_types.aminmax((-both[0], both[1]))
