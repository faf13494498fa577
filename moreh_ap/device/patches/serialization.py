"""Where the tensors of a file of `torch.save` come back to: those that were on an accelerator, or on a GPU, to "cuda".

A file that the script saves says "cpu" of every tensor, so that it loads without us. Which of them were on the
accelerator stands in a record beside them, which PyTorch does not read. Must not know where values are.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moreh_ap.device.patches.registry import Patches
from moreh_ap.device.storage import is_marked, mark
from moreh_ap.device.tensor import place
from moreh_ap.device.transfers import is_accelerator

_RECORD = "moreh_accelerator"  # the numbers of memories, in the order in which the file names them first


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
    serialization, in_hand = torch.serialization, _InHand()

    def save(obj: Any, zip_file: Any, *args: Any, **kwargs: Any) -> None:
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
        number = in_hand.numbers.setdefault(storage._cdata, len(in_hand.numbers))
        if is_marked(storage):
            in_hand.marked.add(number)
        return original_tag(storage)

    def load(zip_file: Any, *args: Any, **kwargs: Any) -> Any:
        outer, in_hand.marked = in_hand.marked, set()
        try:
            if zip_file.has_record(_RECORD):
                in_hand.marked = {int(number) for number in zip_file.get_record(_RECORD).split()}
            return original_load(zip_file, *args, **kwargs)
        finally:
            in_hand.marked = outer

    def get_restore_location(map_location: Any) -> Callable[[Any, Any], Any]:
        restore, marked, numbers = original_restorer(map_location), in_hand.marked, itertools.count()

        def restore_location(storage: Any, location: Any) -> Any:
            return restore(storage, "cuda:0" if next(numbers) in marked else location)

        return restore_location

    def default_restore_location(storage: Any, location: Any) -> Any:
        if location.startswith("cuda") and is_accelerator(location):
            return mark(storage)
        return original_default(storage, location)

    def cuda(storage: Any, device: Any = None, non_blocking: bool = False) -> Any:
        """``map_location=lambda storage, location: storage.cuda(0)``."""
        if device is None or is_accelerator(device):
            return mark(storage.clone())
        return original_cuda(storage, device, non_blocking)

    def rebuild(storage: Any, *where: Any) -> Tensor:
        tensor: Tensor = original_rebuild(storage, *where)  # files of the old format fill its memory only later
        return place(tensor) if is_marked(storage._untyped_storage) else tensor

    original_save = patches.replace(serialization, "_save", save)
    original_tag = patches.replace(serialization, "location_tag", location_tag)
    original_load = patches.replace(serialization, "_load", load)
    original_restorer = patches.replace(serialization, "_get_restore_location", get_restore_location)
    original_default = patches.replace(serialization, "default_restore_location", default_restore_location)
    original_cuda = patches.replace(torch.UntypedStorage, "cuda", cuda)
    original_rebuild = patches.replace(torch._utils, "_rebuild_tensor", rebuild)
