"""Addresses for the memory of accelerator tensors: they identify a memory, but cannot be read.

Libraries that write files use addresses to find tensors that share memory. Tensors with shared memory have the same
address, other tensors have different ones while both exist; the controller cannot read there, as with any device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.values import Cell, Here, View


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
        if isinstance(value, Here):
            held = value.tensor.untyped_storage()
            return cls(held.data_ptr(), held.nbytes(), device, value.tensor.data_ptr())
        while isinstance(cell.value, View):
            cell = cell.value.base
        with torch._C.DisableTorchFunctionSubclass():
            offset_bytes = int(handle.storage_offset()) * handle.element_size()
            last = int(sum((size - 1) * stride for size, stride in zip(handle.size(), handle.stride())))
            size_bytes = offset_bytes + (last + 1) * handle.element_size() if handle.numel() else 0
        address = cell.value.tensor.untyped_storage().data_ptr() if isinstance(cell.value, Here) else id(cell)
        return cls(address, size_bytes, device, address + offset_bytes)

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
    """`storage`, whose memory is what a tensor on the accelerator has in a file (`device.files`)."""
    storage._is_on_accelerator = True
    return storage


def is_marked(storage: Any) -> bool:
    return getattr(storage, "_is_on_accelerator", False)
