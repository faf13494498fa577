"""Addresses for the memory of accelerator tensors: they identify a memory, but cannot be read.

Libraries that write files use addresses to find tensors that share memory. Tensors with shared memory have the same
address, other tensors have different ones while both exist; the controller cannot read there, as with any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.values import Cell, Here, View

_UNREADABLE = (1 << 62) | (1 << 55)
"""Added to what identifies a memory: no process has anything there, and one that reads there is ended by a signal. On
x86-64 an address has at most 57 bits; on ARM the highest eight are ignored, and the next one is the kernel's."""


class AddressOnly:
    """Replaces a storage: its size and address.

    Args:
        address: Address of its first byte.
        size_bytes: Size; for a view of values on the workers, up to the end of the view.
        device: Its device.
        tensor_address: The address of the tensor that it was requested from.
    """

    def __init__(self, address: int, size_bytes: int, device: torch.device, tensor_address: int) -> None:
        self._address, self._size_bytes, self.device = address, size_bytes, device
        self.tensor_address = tensor_address

    @classmethod
    def of(cls, cell: Cell, handle: Tensor) -> AddressOnly:
        """Returns the handle on the storage of the tensor `handle` on `cell`."""
        device, value = cell.device, cell.value
        hides = 0 if device.type == "cpu" and isinstance(value, Here) else _UNREADABLE
        if isinstance(value, Here):
            held = value.tensor.untyped_storage()
            return cls(hides + held.data_ptr(), held.nbytes(), device, hides + value.tensor.data_ptr())
        while isinstance(cell.value, View):
            cell = cell.value.base
        with torch._C.DisableTorchFunctionSubclass():
            offset_bytes = int(handle.storage_offset()) * handle.element_size()
            last = int(sum((size - 1) * stride for size, stride in zip(handle.size(), handle.stride())))
            size_bytes = offset_bytes + (last + 1) * handle.element_size() if handle.numel() else 0
        address = cell.value.tensor.untyped_storage().data_ptr() if isinstance(cell.value, Here) else id(cell)
        return cls(hides + address, size_bytes, device, hides + address + offset_bytes)

    def untyped_storage(self) -> AddressOnly:
        """Returns itself: typed storages have this method too."""
        return self

    def data_ptr(self) -> int:
        """The address of its first byte."""
        return self._address

    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._size_bytes

    size = __len__ = nbytes


def mark(storage: Any) -> Any:
    """Returns `storage`, marked as memory of a tensor that a file says was on the accelerator (`serialization.py`)."""
    storage._is_on_accelerator = True
    return storage


def is_marked(storage: Any) -> bool:
    """Returns whether `mark` was called with `storage`."""
    return getattr(storage, "_is_on_accelerator", False)
