"""Optimizers whose step is known to be one of elements, and classes derived from theirs.

Decides which they are. Must not know how a step is sent.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from moreh_ap.integrations.adamw import AdamW

ELEMENTWISE = "steps_elements_on_workers"
"""The attribute of functions that stand for the `step` of one of these optimizers."""


def elementwise_optimizers() -> list[type[Optimizer]]:
    """Optimizers with an elementwise step, so that a step on every shard is a step on the full tensor.

    Others are tried first (`own_optimizers.py`), and may run one operation after the other.
    """
    names = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
    return [*(getattr(torch.optim, name) for name in names), AdamW]


def elementwise_class(optimizer: Optimizer) -> type[Optimizer]:
    """Returns which of `elementwise_optimizers` an optimizer is, or is derived from."""
    known = elementwise_optimizers()
    return next(cls for cls in type(optimizer).__mro__ if cls in known)


def steps_elementwise(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's step is that of one of `elementwise_optimizers`.

    A class derived from one may have a function of its own for it, since PyTorch puts hooks around it there.
    """
    return hasattr(type(optimizer).step, ELEMENTWISE)


def replaces_a_part(optimizer: Optimizer) -> bool:
    """Returns whether a class derived from one of `elementwise_optimizers` replaces what the step of that one calls."""
    derived = type(optimizer).__mro__[: type(optimizer).__mro__.index(elementwise_class(optimizer))]
    return any("_init_group" in vars(one) for one in derived)
