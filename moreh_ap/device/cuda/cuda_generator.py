"""`torch.Generator(device="cuda")`: numbers for tensors on the accelerator, drawn where such tensors are made.

PyTorch cannot make a generator for a device that its build lacks, and must not make one for a GPU of the controller's
host. Decides what replaces `torch.Generator`; must not know which operations draw.
"""

from __future__ import annotations

from typing import Any

import torch

from moreh_ap.device.tensor import ACCELERATOR
from moreh_ap.device.transfers import is_accelerator
from moreh_ap.patching import Patches

_Generator = torch.Generator


def install(patches: Patches) -> None:
    """Have `torch.Generator("cuda")` make a generator of the accelerator."""
    group = patches.group("PyTorch makes no generator for a device that its build lacks.")
    group.replace(torch, "Generator", Generator)


class _AnyGenerator(type(_Generator)):  # type: ignore[misc]
    """Makes ``isinstance(generator, torch.Generator)`` true for PyTorch's own generators too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


class Generator(_Generator, metaclass=_AnyGenerator):
    """A generator of the accelerator; for another device, the class returns PyTorch's own."""

    def __new__(cls, device: Any = "cpu") -> Any:
        if not is_accelerator(device):
            return _Generator(device)
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return ACCELERATOR
