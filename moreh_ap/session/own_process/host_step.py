"""A step of an optimizer whose parameters are in the script's own process: on their values, as ordinary tensors.

Decides when that gives what the step on accelerator tensors gives. Must not know what the optimizer computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moreh_ap.device.tensor import VirtualTensor, place
from moreh_ap.device.values import Here


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
    groups = [group["params"] for group in optimizer.param_groups]
    parameters = [parameter for group in groups for parameter in group]
    values = [value for value in map(_value_of, parameters) if value is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(values) < len(parameters) or any(_value_of(g) is None or g.grad_fn is not None for g in gradients):
        return False
    before, state = optimizer.state, defaultdict[Any, Any](dict)
    left_in_place: dict[Tensor, dict[str, Any]] = {}
    for parameter, value in zip(parameters, values):
        value.grad = _value_of(parameter.grad)
        if parameter in before:
            state[value] = {key: _on_host(entry) for key, entry in before[parameter].items()}
            left_in_place[value] = dict(state[value])
    optimizer.state, left = state, iter(values)
    for group, theirs in zip(optimizer.param_groups, groups):
        group["params"] = [next(left) for _ in theirs]
    try:
        original(optimizer, None)
    finally:
        optimizer.state = before
        for group, theirs in zip(optimizer.param_groups, groups):
            group["params"] = theirs
        for parameter, value in zip(parameters, values):
            value.grad = None
            if value in state:
                known, same = before[parameter], left_in_place.get(value, {})
                changed = {key: entry for key, entry in state[value].items() if same.get(key) is not entry}
                known.update({key: _for_script(key, entry) for key, entry in changed.items()})
    torch.autograd.graph.increment_version(parameters)
    return True


def _value_of(tensor: Any) -> Tensor | None:
    """Returns the value of an accelerator tensor that is in the controller."""
    if not isinstance(tensor, VirtualTensor) or not tensor.is_cuda or type(tensor._cell.value) is not Here:
        return None
    return tensor._cell.value.tensor


def _on_host(entry: Any) -> Any:
    return entry.host_value() if isinstance(entry, VirtualTensor) else entry


def _for_script(key: str, entry: Any) -> Any:
    """Returns an entry of the state as it would be on one device: on the accelerator but for the number of steps."""
    return place(entry) if isinstance(entry, Tensor) and key != "step" else entry
