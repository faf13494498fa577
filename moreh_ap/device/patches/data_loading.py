"""Batches for the accelerator: memory is not pinned; tensors of a library's class are put together as it says."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.tensor_classes import ClassedTensor
from moreh_ap.patching import Patches


def install(patches: Patches) -> None:
    """Have loaders, and the script, leave batches unpinned."""
    group = patches.group("Batches travel to workers as bytes: pinned memory and a pinning thread gain nothing.")

    def leave_unpinned(loaders: types.ModuleType) -> None:
        def iterate(loader: Any) -> Any:
            """Iterates as if the loader had been made with ``pin_memory=False``."""
            asked, loader.pin_memory = loader.pin_memory, False
            try:
                return original(loader)
            finally:
                loader.pin_memory = asked

        original = group.replace(loaders.DataLoader, "__iter__", iterate)

    group.when_imported("torch.utils.data.dataloader", leave_unpinned)
    group.replace(torch.Tensor, "pin_memory", _pin_memory)
    group.replace(torch.Tensor, "is_pinned", _is_pinned)
    _put_together_by_library_class(patches)


def _put_together_by_library_class(patches: Patches) -> None:
    group = patches.group("PyTorch looks up how to put a batch together by the exact class of its tensors.")

    def by_library_class(collating: types.ModuleType) -> None:
        def collate(batch: Any, *, collate_fn_map: Any = None) -> Any:
            """Puts tensors on the accelerator together as those of the library's class that they have."""
            library_class = type(batch[0]).library_class if isinstance(batch[0], ClassedTensor) else None
            known = None if collate_fn_map is None else collate_fn_map.get(library_class)
            if known is None:
                return original(batch, collate_fn_map=collate_fn_map)
            return known(batch, collate_fn_map=collate_fn_map)

        original = group.replace(collating, "collate", collate)

    group.when_imported("torch.utils.data._utils.collate", by_library_class)


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """The tensor itself."""
    return tensor


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """False."""
    return False
