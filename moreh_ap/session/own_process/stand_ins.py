"""Ordinary tensors in the places of the accelerator tensors whose values they have, while a call runs.

Decides which tensors of a call have such stand-ins. Must not know whether the call's result may be used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Here, Later

PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
"""Classes of values that have no tensor in them."""


class StandIns:
    """The ordinary tensors of one call.

    Attributes:
        args: The positional arguments, with ordinary tensors.
        kwargs: The keyword arguments, likewise.
        leaves: The ordinary tensors that require a gradient: leaves of the call's graph.
        accelerator_leaves: For each of them the accelerator tensor that it stands in for.
        buffers: The values of the buffers. They share memory with the accelerator tensors, as all stand-ins do.
        were_replaced: Whether the call put another parameter, buffer or submodule into a module.
    """

    def __init__(self) -> None:
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.leaves: list[Tensor] = []
        self.accelerator_leaves: list[Tensor] = []
        self.buffers: list[Tensor] = []
        self._given: tuple[list[Any], Any] = ([], None)  # the arguments' leaves and nesting, if they are nested
        self.were_replaced = False
        self._of: dict[int, Tensor] = {}  # by accelerator tensor
        self._places: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []

    def of(self, tensor: Tensor) -> Tensor | None:
        """Returns the stand-in of an accelerator tensor; None if its value is elsewhere."""
        known = self._of.get(id(tensor))
        if known is not None:
            return known
        if not isinstance(tensor, VirtualTensor) or tensor._cell.device is not ACCELERATOR:
            return None
        value = tensor._cell.value
        if type(value) is Later:
            value = tensor._cell.read_here()
        if type(value) is not Here or type(value.tensor) is not Tensor:
            return None
        stand_in = value.tensor
        if tensor.requires_grad:
            stand_in = stand_in.detach().requires_grad_()
            self.leaves.append(stand_in)
            self.accelerator_leaves.append(tensor)
        self._of[id(tensor)] = stand_in
        return stand_in

    def take(self, part: nn.Module, lists: Sequence[str]) -> bool:
        """Adds the parameters and buffers of a module, and its attributes that list them; returns whether it could."""
        namespace = part.__dict__
        self._sizes += [(namespace[name], len(namespace[name])) for name in ("_parameters", "_buffers", "_modules")]
        for held in (namespace["_parameters"], namespace["_buffers"]):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                stand_in = self.of(tensor)
                if stand_in is None:
                    return False
                self._places.append((held, name, tensor, stand_in))
                if held is namespace["_buffers"]:
                    self.buffers.append(stand_in)
        for name in lists:
            listed = [self._listed(one) for one in namespace[name]]
            if any(one is None for one in listed):
                return False
            self._places.append((namespace, name, namespace[name], listed))
        return True

    def _listed(self, element: Any) -> Any:
        """Returns what stands in for an element of a list: a parameter or a weak reference to one."""
        known = self._of.get(id(element() if isinstance(element, weakref.ref) else element))
        return weakref.ref(known) if known is not None and isinstance(element, weakref.ref) else known

    def take_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Adds the arguments of a call; returns whether it could."""
        is_flat = not kwargs and all(isinstance(one, Tensor) for one in args)
        given, spec = ([*args], None) if is_flat else tree_flatten((args, kwargs))
        for index, leaf in enumerate(given):
            if isinstance(leaf, Tensor):
                stand_in = self.of(leaf) if isinstance(leaf, VirtualTensor) else leaf
                if stand_in is None or (stand_in is leaf and (leaf.requires_grad or type(leaf) is not Tensor)):
                    return False
                given[index] = stand_in = stand_in if stand_in.requires_grad else stand_in.detach()
            elif not isinstance(leaf, PLAIN):
                return False
        self.args, self.kwargs = (tuple(given), {}) if spec is None else tree_unflatten(given, spec)
        self._given = given, spec
        return True

    def all(self) -> list[Tensor]:
        """Returns all of them."""
        return [*self._of.values()]

    def were_filled(self) -> bool:
        """Returns whether the call put something into a list or dict among its arguments."""
        before, spec = self._given
        if spec is None:
            return False
        leaves, after = tree_flatten((self.args, self.kwargs))
        return after != spec or any(one is not other for one, other in zip(before, leaves))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the modules have the stand-ins until the block ends."""
        for held, name, _, stand_in in self._places:
            held[name] = stand_in
        try:
            yield
        finally:
            for held, name, tensor, stand_in in self._places:
                if held.get(name) is not stand_in:
                    self.were_replaced = True
                held[name] = tensor
            self.were_replaced |= any(len(held) != size for held, size in self._sizes)

    def share_memory_with(self, results: Sequence[Any]) -> bool:
        """Returns whether a result is a view of a stand-in, or a parameter was given other memory."""
        for leaf, tensor in zip(self.leaves, self.accelerator_leaves):
            if leaf.data_ptr() != tensor._cell.value.tensor.data_ptr():  # type: ignore[attr-defined]
                return True
        taken = {stand_in.untyped_storage().data_ptr() for stand_in in self._of.values() if stand_in.numel()}
        return any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() in taken for one in results)


def stand_ins_for(
    parts: Sequence[tuple[nn.Module, Sequence[str]]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StandIns | None:
    """Returns the stand-ins for a call; None if not all of its tensors can have one.

    Args:
        parts: The modules, each with the names of its attributes that list parameters.
        args: The call's positional arguments.
        kwargs: Its keyword arguments.
    """
    stand_ins = StandIns()
    if all(stand_ins.take(part, lists) for part, lists in parts) and stand_ins.take_call(args, kwargs):
        return stand_ins
    return None
