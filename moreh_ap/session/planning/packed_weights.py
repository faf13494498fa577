"""Frozen weights that are packed into fewer bits than a value of PyTorch has, as the planner sees them.

Decides what counts as packed, and how large it is. A packed parameter is a tensor of bytes with the constants of its
quantization, and the shape of the weight that they encode, in its attribute `quant_state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn


def is_packed(parameter: nn.Parameter) -> bool:
    """Returns whether a parameter holds packed values."""
    return not parameter.requires_grad and getattr(parameter, "quant_state", None) is not None


def has_packed_weights(root: nn.Module) -> bool:
    """Returns whether a parameter of a model is packed."""
    return any(map(is_packed, root.parameters()))


def num_values(parameter: nn.Parameter) -> int:
    """Returns the number of weights that are packed in a parameter; of any other, its elements."""
    return math.prod(parameter.quant_state.shape) if is_packed(parameter) else parameter.numel()  # type: ignore[attr-defined]


def stored_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of a parameter, without the constants of its quantization."""
    return parameter.numel() * parameter.element_size()


def constant_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of the constants of a parameter's quantization, of which each device has all."""
    if not is_packed(parameter):
        return 0
    state = parameter.quant_state  # type: ignore[attr-defined]
    constants: Iterable[object] = (state.absmax, state.offset, getattr(state.state2, "absmax", None))
    return sum(one.numel() * one.element_size() for one in constants if isinstance(one, Tensor))
