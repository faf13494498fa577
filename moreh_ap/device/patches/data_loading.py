"""Batches for the accelerator: their memory is not pinned."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

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


def _pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
    """The tensor itself."""
    return tensor


def _is_pinned(tensor: Tensor, device: Any = None) -> bool:
    """False."""
    return False
