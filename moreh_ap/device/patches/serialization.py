"""Devices of tensors in files of `torch.save`: tensors from an accelerator, or a GPU, are loaded to "cuda".

A file that the script saves has "cpu" as the device of every tensor, so that it loads without this package. A further
record in the file, which PyTorch does not read, lists the tensors that were on the accelerator. Must not know where
values are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.host_tensors import put
from moreh_ap.device.storage import is_marked, mark
from moreh_ap.device.transfers import is_accelerator
from moreh_ap.patching import Patches

_RECORD = "moreh_accelerator"  # numbers of storages, in the order of their first occurrence in the file


class _InHand(threading.local):
    """The file that this thread writes or reads.

    Attributes:
        numbers: Number of each memory that the file being written has named so far.
        marked: Numbers of those that are on the accelerator.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.marked: set[int] = set()


def install(patches: Patches) -> None:
    """Have `torch.save` note what is on the accelerator, and `torch.load` put there what was, or is to be."""
    group = patches.group('A file says "cpu" of every tensor, to load without us; a record says which were not.')
    serialization, in_hand = torch.serialization, _InHand()

    def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> None:
        """Writes a file, with a record of which tensors were on the accelerator."""
        outer = in_hand.numbers, in_hand.marked
        in_hand.numbers, in_hand.marked = {}, set()
        try:
            original_save(obj, zip_file, *args, **kwargs)
            if in_hand.marked:
                content = " ".join(map(str, sorted(in_hand.marked))).encode()
                zip_file.write_record(_RECORD, content, len(content))
        finally:
            in_hand.numbers, in_hand.marked = outer

    def location_tag(storage: Any) -> Any:
        """Notes whether a memory of the file being written is on the accelerator."""
        number = in_hand.numbers.setdefault(storage._cdata, len(in_hand.numbers))
        if is_marked(storage):
            in_hand.marked.add(number)
        return original_tag(storage)

    def load(zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        """Reads a file and its record of tensors on the accelerator."""
        outer, in_hand.marked = in_hand.marked, set()
        try:
            if zip_file.has_record(_RECORD):
                in_hand.marked = {int(number) for number in zip_file.get_record(_RECORD).split()}
            return original_load(zip_file, *args, **kwargs)
        finally:
            in_hand.marked = outer

    def get_restore_location(map_location: Any) -> Callable[[Any, Any], Any]:
        """Gives `map_location` "cuda:0" for memories in that record."""
        restore, marked, numbers = original_restorer(map_location), in_hand.marked, itertools.count()

        def restore_location(storage: Any, location: Any) -> Any:
            return restore(storage, "cuda:0" if next(numbers) in marked else location)

        return restore_location

    def default_restore_location(storage: Any, location: Any) -> Any:
        """Marks a memory whose location is "cuda" as one on the accelerator."""
        if location.startswith("cuda") and is_accelerator(location):
            return mark(storage)
        return original_default(storage, location)

    def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        """A copy marked as one on the accelerator: ``map_location=lambda storage, location: storage.cuda(0)``."""
        if device is None or is_accelerator(device):
            return mark(storage.clone())
        return original_cuda(storage, device, non_blocking)

    def rebuild(storage: Any, *where: Any) -> Tensor:
        """Puts a tensor whose memory is marked on the accelerator."""
        tensor: Tensor = original_rebuild(storage, *where)  # files of the old format fill its memory only later
        return put(tensor) if is_marked(storage._untyped_storage) else tensor

    original_save = group.replace(serialization, "_save", save)
    original_tag = group.replace(serialization, "location_tag", location_tag)
    original_load = group.replace(serialization, "_load", load)
    original_restorer = group.replace(serialization, "_get_restore_location", get_restore_location)
    original_default = group.replace(serialization, "default_restore_location", default_restore_location)
    original_cuda = group.replace(torch.UntypedStorage, "cuda", cuda)
    original_rebuild = group.replace(torch._utils, "_rebuild_tensor", rebuild)
