"""The `AdamW` that transformers had until 4.x, number for number.

Decides the update rule, which differs from `torch.optim.AdamW` in three points: epsilon is added to the root of the
second moment before its bias is corrected, weight decay comes after the update and uses the new value, and the
defaults are others. Must not know where a parameter lives: the same class runs in one process and in every worker on
its own shard, since every operation is element by element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from moreh_ap.errors import OptionError, UnsupportedError

_LINK = "docs/ap/advanced-settings.md#adamw"


class AdamW(Optimizer):
    r"""Adam with decoupled weight decay, in the form of transformers.

    For gradient $g$ at step $t$, with $m$ and $v$ the moving averages of $g$ and $g^2$:

    $$p \leftarrow p - lr\,\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}\,\frac{m}{\sqrt v + \epsilon},\qquad
    p \leftarrow p - lr\,\lambda\,p$$

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Decay rates of the two averages.
        eps: Added to the root of the second average.
        weight_decay: $\lambda$ above.
        correct_bias: Whether the two square-root and power factors are applied; without them the factor is `lr`.
        no_deprecation_warning: Accepted and ignored, as old scripts pass it.

    Raises:
        OptionError: A hyper-parameter is out of its range.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2; Kingma and Ba, "Adam",
        2015, end of section 2 (the form with the step size corrected).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if lr < 0.0:
            raise OptionError(f"AdamW: lr={lr!r}", "a number of at least 0", "AdamW(params, lr=1e-3)", _LINK)
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise OptionError(
                f"AdamW: betas={betas!r}", "two numbers from 0 to below 1", "AdamW(params, betas=(0.9, 0.999))", _LINK
            )
        if eps < 0.0:
            raise OptionError(f"AdamW: eps={eps!r}", "a number of at least 0", "AdamW(params, eps=1e-6)", _LINK)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates every parameter that has a gradient; returns what `closure` returned, or None.

        Raises:
            UnsupportedError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update(parameter: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Applies one step to one parameter in place; `grad`, and both averages in `state`, have its shape."""
    if grad.is_sparse:
        raise UnsupportedError(
            "AdamW: a gradient is sparse", "dense gradients", "torch.nn.Embedding(..., sparse=False)", _LINK
        )
    if not state:
        state["step"] = 0
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    beta1, beta2 = group["betas"]
    first = state["exp_avg"].mul_(beta1).add_(grad, alpha=1.0 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    step_size = group["lr"]
    if group["correct_bias"]:
        step_size *= math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
    parameter.addcdiv_(first, second.sqrt().add_(group["eps"]), value=-step_size)
    if group["weight_decay"] > 0.0:
        parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
