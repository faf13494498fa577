"""A table of values by tensor, such as the placement of rows of each tensor in a forward.

Decides how an alias of a tensor is recognized. Must not know what the values mean.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn


class Placements:
    """A table whose keys are tensors, found by an alias too; an entry is dropped with its tensor."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._by_memory: dict[Any, weakref.ref[Tensor]] = {}

    def __setitem__(self, tensor: Tensor, what: Any) -> None:
        reference = weakref.ref(tensor)
        self._known[id(tensor)] = (reference, what)
        self._by_memory[_memory(tensor)] = reference

    def get(self, tensor: Tensor) -> Any:
        """Returns what was set for the tensor, None if nothing was."""
        reference, what = self._known.get(id(tensor), (None, None))
        if reference is not None and reference() is tensor:
            return what
        if isinstance(tensor, nn.Parameter) or not tensor.numel():
            return None
        # An autograd.Function that returns its input, as FSDP2 has them at the ends of blocks, makes an alias.
        alias = self._by_memory.get(_memory(tensor))
        original = None if alias is None else alias()
        if original is None or original is tensor or _memory(original) != _memory(tensor):
            return None
        self[tensor] = what = self.get(original)
        return what

    def forget(self, tensor: Tensor) -> None:
        """Removes the tensor: it has no placement."""
        self._known.pop(id(tensor), None)
        self._by_memory.pop(_memory(tensor), None)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
