"""A mean whose denominator is found out when the forward is through.

Decides what stands for such a mean until then. Must not know how workers find out the denominator, or which means may
wait.

[Note: postponed]
The mean of a loss is the last that most forwards compute, and they do nothing but return it. Workers then need one
exchange, not two: the denominator travels with the news that the forward is through. Until then a NaN stands for the
mean, and every call of a torch function, other than a question about shapes and the like, first asks for the number.
The functions of `torch.jit.script` and blocks that are compiled ask for it too: function modes do not see inside them.
A gradient is divided by the denominator when it comes, which is later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack

from moreh_ap.patching import Patches


class PostponedMean:
    """The mean.

    Args:
        total: What is divided: one number.
        count: What this worker adds to the denominator.
        place: Where in the forward it is.

    Attributes:
        count: What this worker adds, in float64.
        denominator: By what is divided; NaN until `settle`.
        share: This worker's share of the mean; NaN until `settle`.
    """

    def __init__(self, total: Tensor, count: Tensor | int, place: int) -> None:
        if isinstance(count, Tensor):
            self.count = count.double()
        else:
            self.count = total.new_full((), count, dtype=torch.float64)
        self.place = place
        self.denominator = total.new_full((), math.nan, dtype=torch.float64)
        self.share: Tensor = _Share.apply(total, self.denominator)
        self._total = total

    def settle(self, everywhere: Tensor) -> None:
        """Fills the share in, given the denominator."""
        self.denominator.copy_(everywhere)
        self.share.data.copy_(self._total.detach() / self.denominator)  # `.data`: nobody has seen another value


class _Share(torch.autograd.Function):
    """The share, with the gradient of a division by a number that need not be known yet."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, denominator: Tensor) -> Tensor:
        ctx.denominator = denominator  # kept as it is: a copy, as of saved tensors that go to the host, would stay NaN
        return torch.full_like(total, math.nan)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return (grad / ctx.denominator).to(grad.dtype), None


def can_wait(total: Tensor) -> bool:
    """Says whether a mean may be filled in later: it is one number, and no transform computes with it."""
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return total.ndim == 0 and type(total) is Tensor and not in_transform


def install(patches: Patches) -> None:
    """Have functions of `torch.jit.script` get the values of means."""
    group = patches.group("Function modes do not see what happens inside the functions of `torch.jit.script`.")
    call = torch.jit.ScriptFunction.__call__
    group.replace(torch.jit.ScriptFunction, "__call__", _settling(call), "Means of a forward get their values first.")


def _settling(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_function_mode_stack():
            settle = getattr(mode, "settle", None)
            if settle is not None:
                settle()
        return original(*args, **kwargs)

    return call
