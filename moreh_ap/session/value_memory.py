"""A file in memory into which workers of this machine write values, which become tensors where they lie.

Decides how a tensor has the memory, and which tensors are read along with one. Must not know how commands travel.

[Note: reading ahead]
A save reads hundreds of tensors one by one, and a message takes about 2 ms. Once a script has read two that follow each
other, the next ones come along, first a few, later 64 MiB in a message. They count only as long as no other command is
posted: the workers' tensors cannot have changed. Each is given out once, since the script may change what it gets.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from moreh_ap.protocol.messages.memory_files import BYTES_PER_WORKER, MemoryFile
from moreh_ap.protocol.messages.state import StoredTensor
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.session.outbox import Outbox

InOrder = Sequence[tuple[StateRef, int]]
"""Tensors in the order in which they are usually read, each with its bytes."""

_AHEAD_BYTES = 1 << 26
_FIRST_AHEAD = 4
_NEAR = 4  # tied parameters are left out by who saves

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


class _Owner(Protocol):
    def in_order(self) -> InOrder: ...


@dataclass
class _Run:
    """What one read has left for the next.

    Attributes:
        moment: What `ReadAhead._moment` returns as long as nothing can have changed.
        last: The tensor that was read last.
        values: What came along and was not asked for yet.
        count: How many came along at most.
        in_order, places: The order, and the place of each tensor in it; empty until it is needed.
    """

    moment: tuple[int, ...]
    last: StateRef
    values: dict[StateRef, Tensor] = field(default_factory=dict)
    count: int = 0
    in_order: InOrder = ()
    places: dict[StateRef, int] = field(default_factory=dict)


class ReadAhead:
    """Reads state tensors one by one. See [Note: reading ahead].

    Args:
        outbox: Where commands are posted.
        read: Reads some; waits.
    """

    def __init__(self, outbox: Outbox, read: Callable[[tuple[StateRef, ...]], list[Tensor]]) -> None:
        self._outbox, self._read = outbox, read
        self._run: _Run | None = None  # replaced as a whole: several threads may read

    def read(self, ref: StateRef, owner: _Owner) -> Tensor:
        """Returns the full value of a state tensor, on the CPU, with memory of its own. May wait.

        Args:
            ref: Its name.
            owner: Knows what is saved with it.
        """
        moment, run = self._moment(), self._run
        if run is not None and run.moment != moment:
            run = self._run = None
        if run is not None and (value := run.values.pop(ref, None)) is not None:
            run.last = ref
            return value
        new = _Run((moment[0] + 1, *moment[1:]), ref)
        refs = (ref,) if run is None or run.last.owner != ref.owner else (ref, *_following(run, new, owner))
        values = self._read(refs)
        new.values = dict(zip(refs[1:], values[1:]))
        self._run = new
        return values[0]

    def _moment(self) -> tuple[int, ...]:
        return self._outbox.num_posted, self._outbox.times_restarted, self._outbox.times_failed


def _following(run: _Run, new: _Run, owner: _Owner) -> list[StateRef]:
    """Returns what is read along with `new.last`, after `run`."""
    new.in_order, new.places = run.in_order, run.places
    if new.last not in new.places or run.last not in new.places:
        new.in_order = owner.in_order()
        new.places = {ref: place for place, (ref, _) in enumerate(new.in_order)}
    here, before = new.places.get(new.last), new.places.get(run.last)
    if here is None or before is None or not 0 < here - before <= _NEAR:
        return []
    new.count = max(_FIRST_AHEAD, 2 * run.count)
    num_bytes, following = new.in_order[here][1], []
    for ref, more in new.in_order[here + 1 : here + 1 + new.count]:
        num_bytes += more
        if num_bytes > _AHEAD_BYTES:
            break
        following.append(ref)
    return following


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
