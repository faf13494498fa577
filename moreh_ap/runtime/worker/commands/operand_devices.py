"""Where an operation on states runs whose operands are on several devices.

Parameters, gradients and optimizer state may be in host memory (`offload=all`), and what a script computes with beside
them on the device. Decides which operands are copied to where the others are. Must not know commands or models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.parallelizer.state.loading import local_shard, moved_shard

_HOST = torch.device("cpu")


def on_one_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of an operation of PyTorch, all on one device where that is needed.

    What the operation writes stays where it is, and decides; without that, host memory does. Nothing is copied if
    operands agree, or if what is written is on several devices, which PyTorch treats pair by pair. A number in host
    memory goes with operands of any device.
    """
    written = _devices(_written(func, args, kwargs))
    if len(_devices((args, kwargs))) < 2 or len(written) > 1:
        return args, kwargs
    target = written.pop() if written else _HOST

    def moved(tensor: Tensor) -> Tensor:
        device = local_shard(tensor).device
        if device == target or (device == _HOST and tensor.ndim == 0):
            return tensor
        return moved_shard(tensor, target) if isinstance(tensor, DTensor) else tensor.to(target)

    args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
    return args, kwargs


def _devices(arguments: Any) -> set[torch.device]:
    return {local_shard(leaf).device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Returns the arguments that the operation writes."""
    given = dict(zip((one.name for one in func._schema.arguments), args)) | kwargs
    names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return [given[name] for name in names if name in given]
