"""Lazy modules (`nn.LazyLinear`) that a script moves to the accelerator before their parameters have shapes.

Decides when they get shapes: in a run of the first call in this process, before the real one. Their values are drawn in
that run, in the order of one device. Must not know how a model is built on the workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError


def has_no_shapes(module: nn.Module) -> bool:
    """Returns whether a parameter or buffer of the module has no shape yet."""
    return any(is_lazy(tensor) for tensor in itertools.chain(module.parameters(), module.buffers()))


def give_shapes(module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> None:
    """Gives lazy parameters the shapes and values of a first call of `module` with these arguments.

    The call runs twice: whether it draws more than values shows in the second run. What else a forward changes, or
    draws from Python's `random` or NumPy, changes with each.

    Args:
        module: It and its parameters are on the CPU.
        args: Positional arguments of the call, on any device.
        kwargs: Keyword arguments of the call, on any device.
        call: ``call(module, *args, **kwargs)`` runs a module in this process.

    Raises:
        UnsupportedError: The call draws random numbers beside those of the parameters; on one device they alternate.
    """
    args, kwargs = tree_map_only(VirtualTensor, VirtualTensor.to_host, (args, kwargs))
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if not is_lazy(buffer)}
    with torch.no_grad():
        call(module, *args, **kwargs)
        for submodule in module.modules():
            if isinstance(submodule, nn.modules.batchnorm._BatchNorm):
                submodule.reset_running_stats()
        for name, buffer in module.named_buffers():
            if name in before:
                buffer.copy_(before[name])
        after_values = torch.get_rng_state()
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        call(module, *args, **kwargs)
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
    if not torch.equal(torch.get_rng_state(), after_values):
        raise UnsupportedError(
            "A lazy module moves before its first call, and that call draws random numbers (dropout) beside the values "
            "of its parameters.",
            allowed="Lazy modules that have been called once, on the CPU, or whose first call draws nothing else.",
            fix="model(example)  # then model.cuda()",
        )
