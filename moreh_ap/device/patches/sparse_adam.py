"""`torch.optim.SparseAdam`, which needs the rows of an embedding that a batch used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have `SparseAdam` refuse parameters on the accelerator."""
    group = patches.group("Gradients on the accelerator are dense.")
    cls = torch.optim.SparseAdam

    @functools.wraps(cls.step)
    def step(optimizer: torch.optim.SparseAdam, closure: Callable[[], Any] | None = None) -> Any:
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        if any(isinstance(parameter, VirtualTensor) and parameter.is_cuda for parameter in parameters):
            raise UnsupportedError(
                "SparseAdam needs to know which rows of an embedding a batch used; gradients on the accelerator are "
                "dense.",
                allowed="Optimizers that take dense gradients; to SGD and Adagrad they are as good as sparse ones.",
                fix="torch.optim.Adagrad(parameters, lr=...)",
                link="docs/limits.md#models",
            )
        return original(optimizer, closure)

    original = group.replace(cls, "step", step, "Refuses parameters on the accelerator.")
