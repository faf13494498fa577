"""A file in memory into which workers of this machine write values, which become tensors where they lie.

Decides how a tensor has the memory. Must not know what is read, nor how commands travel.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import weakref

import torch
from torch import Tensor

from moreh_ap.protocol.messages.state import BYTES_PER_WORKER, MemoryFile, StoredTensor
from moreh_ap.protocol.messages.tensors import TensorData

_numbers = itertools.count()

_FAILED = ctypes.c_void_p(-1).value


class ValueMemory:
    """One such file; tensors in it keep their memory when it is closed.

    Args:
        num_workers: How many workers may write into it.
        is_shared: Whether they are on this machine; if not, there is no file.

    Attributes:
        file: By what workers find it; None if there is none.
    """

    def __init__(self, num_workers: int, is_shared: bool) -> None:
        self.file: MemoryFile | None = None
        if not is_shared or sys.platform != "linux":
            return
        name = f"moreh-values-{next(_numbers)}"
        descriptor = os.memfd_create(name)
        try:
            os.truncate(descriptor, num_workers * BYTES_PER_WORKER)
        except OSError:  # the user's limit on the size of files
            os.close(descriptor)
            return
        self.file = MemoryFile(os.getpid(), descriptor, name)

    def tensor(self, stored: StoredTensor | TensorData) -> Tensor:
        """Returns what a worker has answered as a CPU tensor that owns its memory."""
        if isinstance(stored, TensorData):
            return stored.tensor().clone()  # a script may resize it, which PyTorch refuses for memory of Python
        assert self.file is not None, "workers cannot have written into what is not there"
        memory = _mapped(self.file.descriptor, stored.start, stored.num_bytes)
        if memory is None:
            flat = torch.empty(stored.num_bytes, dtype=torch.uint8)
            view, at = flat.numpy().data, stored.start
            while view:
                num_read = os.preadv(self.file.descriptor, [view], at)
                at, view = at + num_read, view[num_read:]
            flat = flat.view(stored.dtype)
        else:
            flat = torch.frombuffer(memory, dtype=stored.dtype)
        return flat.as_strided(stored.shape, stored.strides)

    def close(self) -> None:
        """Closes it."""
        if self.file is not None:
            os.close(self.file.descriptor)


def _mapped(descriptor: int, start: int, num_bytes: int) -> ctypes.Array[ctypes.c_char] | None:
    """Returns a part of a file as memory whose changes stay in this process; None if there is no room for one more.

    An `mmap.mmap` would keep a descriptor open for every tensor.
    """
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = library.mmap(None, num_bytes, access, mmap.MAP_PRIVATE, descriptor, start)
    if address in (None, _FAILED):
        return None
    memory = (ctypes.c_char * num_bytes).from_address(address)
    unmap = weakref.finalize(memory, library.munmap, ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))
    unmap.atexit = False  # tensors may outlive this module
    return memory
