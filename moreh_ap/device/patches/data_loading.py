"""Batches on their way to the accelerator: nothing is pinned, and tensors on the accelerator stay in this process."""

from __future__ import annotations

import functools
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.patches.registry import Patches
from moreh_ap.device.tensor import VirtualTensor
from moreh_ap.errors import UnsupportedError
from moreh_ap.import_hook import when_imported


def install(patches: Patches) -> None:
    """Have loaders leave batches unpinned, and parameters refuse to go to another process."""
    # There is nothing to pin, and no thread of a loader is needed for it.
    patches.on_undo(when_imported("torch.utils.data.dataloader", lambda loaders: _leave_unpinned(patches, loaders)))
    patches.replace(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)
    patches.replace(torch.Tensor, "is_pinned", lambda tensor, device=None: False)
    _redirect_sharing(patches)


def _leave_unpinned(patches: Patches, loaders: types.ModuleType) -> None:
    cls: Any = loaders._BaseDataLoaderIter  # type: ignore[attr-defined]

    @functools.wraps(cls.__init__)
    def init(iterator: Any, loader: Any) -> None:
        original(iterator, loader)
        iterator._pin_memory = False

    original = patches.replace(cls, "__init__", init)


def _redirect_sharing(patches: Patches) -> None:
    """What is on a device all processes can share; a model on the accelerator none but this one."""

    def share_memory(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, VirtualTensor) else original(tensor)

    def reduce(tensor: VirtualTensor) -> Any:
        if getattr(tensor, "_is_param", False):
            raise UnsupportedError(
                f"A parameter of shape {tuple(tensor.shape)} goes to another process, which would train a copy.",
                allowed="Models on the accelerator in the script's own process and its threads.",
                fix="model.cpu()  # before multiprocessing.Process(target=train, args=(model,))",
            )
        return tensor.__reduce_ex__(2)

    original = patches.replace(torch.Tensor, "share_memory_", share_memory)
    ForkingPickler.register(VirtualTensor, reduce)
    patches.on_undo(lambda: ForkingPickler._extra_reducers.pop(VirtualTensor, None))  # type: ignore[attr-defined]
