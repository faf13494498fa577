"""Writes values that the controller reads into a file in its memory, so that no message has to carry them.

Decides which values go there. Must not know which tensors they belong to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER, MemoryFile
from moreh_ap.protocol.messages.state import StoredTensor
from moreh_ap.protocol.messages.tensors import TensorData

MIN_STORED_BYTES = 1 << 18
"""Of a smaller value the copies that a message makes take less time than the controller needs to map it."""

_STAGING_BYTES = 1 << 24


@contextlib.contextmanager
def writing_to(file: MemoryFile | None, rank: int) -> Iterator[Callable[[Tensor], TensorData | StoredTensor]]:
    """Gives a function that returns a whole tensor as it is answered, and writes it into `file` if it is large.

    Values travel with the answer if the file cannot be opened, or has no memory left.
    """
    descriptor = None if file is None else _opened(file)
    if descriptor is None:
        yield _as_bytes
        return
    try:
        yield _Writer(descriptor, rank * BYTES_PER_WORKER).write
    finally:
        os.close(descriptor)


def _as_bytes(tensor: Tensor) -> TensorData:
    return TensorData.of(tensor.cpu())


def _opened(file: MemoryFile) -> int | None:
    """Returns a descriptor; None where the controller cannot be reached, or has closed the file since (a replay)."""
    try:
        descriptor = os.open(f"/proc/{file.process}/fd/{file.descriptor}", os.O_WRONLY)
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"/memfd:{file.name} "):
            return descriptor
        os.close(descriptor)
    except OSError:  # another namespace, or a controller whose memory may not be read
        return None
    return None


class _Writer:
    def __init__(self, descriptor: int, start: int) -> None:
        self._descriptor, self._at = descriptor, start

    def write(self, tensor: Tensor) -> TensorData | StoredTensor:
        num_bytes = tensor.numel() * tensor.element_size()
        if num_bytes < MIN_STORED_BYTES or tensor.layout is not torch.strided:
            return _as_bytes(tensor)
        tensor = tensor.detach()
        dense = tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.preserve_format)
        flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)  # in the order of memory, as `TensorData.of`
        start = at = self._at
        try:
            for part in _in_host_memory(flat):
                view = part.numpy().data
                while view:
                    written = os.pwrite(self._descriptor, view, at)
                    at, view = at + written, view[written:]
        except OSError:
            return _as_bytes(tensor)
        self._at = -(-at // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return StoredTensor(tensor.dtype, tuple(tensor.shape), dense.stride(), start, num_bytes)


def _in_host_memory(flat: Tensor) -> Iterator[Tensor]:
    """Yields the bytes in parts; each is valid until the next."""
    if flat.device.type == "cpu":
        yield flat
        return
    staging = torch.empty(min(_STAGING_BYTES, flat.numel()), dtype=torch.uint8, pin_memory=True)
    for part in flat.split(_STAGING_BYTES):
        yield staging[: part.numel()].copy_(part)
