"""Refuses random numbers where every worker computes the rows of all.

Must not know which part of a forward that is.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.rng.drawing_operations import draws_numbers


class RefusedDraws(TorchDispatchMode):
    """While active, no random numbers may be drawn, on any device.

    Raises:
        Diverged: A function draws.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws_numbers(func, args, kwargs, anywhere=True):
            raise Diverged("the forward draws where it computes the rows of all workers")
        return func(*args, **kwargs)
