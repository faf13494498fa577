"""Sums over what the submodules of a model return on one worker, so that two ways to run a forward can be compared.

Knows nothing of what they are compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moreh_ap.protocol.messages.models import ModuleSum
from moreh_ap.protocol.pytree import flatten


class ModuleSums:
    """Records while it is open.

    Args:
        module: The model; its submodules are recorded, and itself under the path "".
    """

    def __init__(self, module: nn.Module) -> None:
        self._sums: dict[str, list[float]] = {}
        self._hooks = [
            submodule.register_forward_hook(lambda _, args, output, path=path: self._add(path, output))  # type: ignore[misc]
            for path, submodule in module.named_modules()
        ]

    def close(self) -> tuple[ModuleSum, ...]:
        """Ends the recording; returns a sum for each submodule that ran, in the order in which they first ended."""
        for hook in self._hooks:
            hook.remove()
        return tuple(ModuleSum(path, int(count), *sums) for path, (count, *sums) in self._sums.items())

    @torch.no_grad()
    def _add(self, path: str, output: Any) -> None:
        tensors = [leaf for leaf in flatten(output)[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        sums = self._sums.setdefault(path, [0.0, 0.0, 0.0])
        for tensor in tensors:
            local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().double()
            sums[0] += local.numel()
            sums[1] += float(local.sum())
            sums[2] += float(local.square().sum())
