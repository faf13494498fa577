"""What a model consists of, in forms that show whether the script has changed it since the last call."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def hook_keys(modules: list[nn.Module]) -> list[tuple[int, ...]]:
    """Returns the keys of all hooks of the modules, to notice a change."""
    return [
        (
            number,
            *submodule._forward_pre_hooks,
            *submodule._forward_hooks,
            *submodule._backward_pre_hooks,
            *submodule._backward_hooks,
        )
        for number, submodule in enumerate(modules)
        if submodule._forward_hooks
        or submodule._forward_pre_hooks
        or submodule._backward_hooks
        or submodule._backward_pre_hooks
    ]


def registered_members(modules: list[nn.Module]) -> list[nn.Module | Tensor | None]:
    """Returns all registered submodules, parameters and buffers: ``layers.insert(0, layer)`` sets no attribute."""
    own = (registry for module in modules for registry in (module._modules, module._parameters, module._buffers))
    return [member for registry in own for member in registry.values()]


def usual_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()
