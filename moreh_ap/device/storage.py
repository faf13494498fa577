"""Where an accelerator tensor says that its memory lies: numbers to tell memories apart, not to read them.

Libraries that write files ask for them to find tensors that share memory. Tensors that share a memory give the same
address, others do not while both exist; as with any device, nothing can be read there from the controller.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.values import Cell, Here, View


class AddressOnly:
    """Answers for a storage: how large it is, and where.

    Args:
        address: Of its first byte.
        size_bytes: Of a view of absent values, as far as the view reaches.
        device: Where it is.
        tensor_address: The address of the tensor that was asked.
    """

    def __init__(self, address: int, size_bytes: int, device: torch.device, tensor_address: int) -> None:
        self._address, self._size_bytes, self.device = address, size_bytes, device
        self.tensor_address = tensor_address

    @classmethod
    def of(cls, cell: Cell, handle: Tensor) -> AddressOnly:
        """What there is to say of the tensor `handle` on `cell`."""
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
        """Itself: what is asked of a tensor may be asked here."""
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
