"""A step of an optimizer whose parameters are in the script's own process: on their values, as ordinary tensors.

Decides when that gives what the step on accelerator tensors gives. Must not know what the optimizer computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from moreh_ap.device.host_tensors import HostTensor, as_host, mark, may_be_held, without_class
from moreh_ap.device.tensor import VirtualTensor


def step_on_values(optimizer: Optimizer, original: Callable[..., Any]) -> bool:
    """Runs a step, without a closure, on the values of the parameters; returns False, with nothing done, if it cannot.

    Args:
        optimizer: One whose class updates the tensors of `param_groups` and `state` in place.
        original: The class's own method.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False  # they may look at the parameters
    with torch._C.DisableTorchFunction():  # nothing in it is on the accelerator, and each attribute would be redirected
        return _step(optimizer, getattr(original, "__wrapped__", original))  # its hooks, of which it has none, were run


def _step(optimizer: Optimizer, original: Callable[..., Any]) -> bool:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not all(isinstance(one, VirtualTensor) and may_be_held(one) for one in parameters):
        return False
    gradients = [one.grad for one in map(as_host, parameters) if one.grad is not None]  # type: ignore[arg-type]
    if any(type(one) is not HostTensor or one.grad_fn is not None for one in gradients):
        return False
    state = [
        entry for known in optimizer.state.values() for entry in known.values() if isinstance(entry, VirtualTensor)
    ]
    if not all(map(may_be_held, state)):
        return False
    with without_class([*parameters, *gradients, *map(as_host, state)]), torch.no_grad():
        original(optimizer, None)
    for known in optimizer.state.values():
        for key, entry in known.items():
            if key != "step":  # the number of steps is on the CPU on every device
                mark(entry)
    return True
