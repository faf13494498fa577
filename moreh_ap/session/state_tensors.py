"""State tensors: parameters, buffers, gradients and optimizer state that workers keep, and operations on them.

An operation all of whose tensors are on the workers runs there, each worker on its own shard, if it has a rule for that
(`protocol.shard_rules`); for any other, the controller reads the tensors, computes, and writes back (`device.tensor`).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moreh_ap.device.operations import meta_of, written_arguments
from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, Here, Value
from moreh_ap.protocol.messages.state import ReleaseState, RunOperation, UnscaleGradients
from moreh_ap.protocol.messages.tensors import StateRef, TensorData
from moreh_ap.protocol.shard_rules import StateRule, shard_rules
from moreh_ap.session.session import Session
from moreh_ap.session.value_memory import InOrder

_READ_BYTES = 2**26
"""Of one message with values."""


@dataclass(eq=False)
class OnWorkers(Value):
    """A tensor that the workers keep under a name.

    Attributes:
        owner: The holder that knows the gradient: the model of a parameter, otherwise a plain `StateHolder`.
        ref: The tensor's name.
    """

    owner: StateHolder = field()  # no default, unlike `Value`
    ref: StateRef

    stays = reads_copies = True

    def ready(self) -> bool:
        return False

    def runner(self) -> Any:
        return self.owner.run_operation

    def placement(self) -> str | None:
        """Identifies how the tensor is sharded; None if the plan shards all tensors alike."""
        return self.owner.placement_of(self.ref)

    def read(self) -> Tensor:
        return self.owner.session.reader.read(self.ref, self.owner)

    def write(self, tensor: Tensor) -> None:
        self.owner.session.write_state({self.ref: tensor})


class ReadOnce(OnWorkers):
    """A number that the workers keep until the controller reads it."""

    stays = reads_copies = False


class StateHolder:
    """Serves the virtual tensors on the workers: runs operations, gets and sets gradients.

    Args:
        session: The session of the workers.
        placement: `OnWorkers.placement` of all tensors of this holder.
        in_order: What `in_order` returns.
        kept: What the workers forget the tensors with, and which lives as long as one of them.
    """

    def __init__(
        self, session: Session, placement: str | None = None, in_order: InOrder = (), kept: object = None
    ) -> None:
        self.session, self._kept = session, kept
        self._placement = placement
        self._in_order = in_order

    def placement_of(self, ref: StateRef) -> str | None:
        """Returns how a tensor is sharded."""
        return self._placement

    def in_order(self) -> InOrder:
        """Returns the tensors that are saved with these, in their order, each with its bytes; empty: not known."""
        return self._in_order

    def keeps_gradient(self, value: Value) -> bool:
        """Returns whether the gradient of the tensor is on the workers."""
        return False

    def gradient_of(self, value: Any) -> Tensor | None:
        raise TypeError("only parameters keep gradients on the workers")

    def set_gradient(self, value: Any, gradient: Tensor | None) -> None:
        raise TypeError("only parameters keep gradients on the workers")

    def add_gradient(self, value: Any, gradient: Tensor) -> None:
        raise TypeError("only parameters keep gradients on the workers")

    def no_longer_keeps(self, value: Any) -> None:
        """Called when the script gives the tensor another shape or dtype."""

    def is_own(self, value: Any, tensor: Tensor) -> bool:
        """Returns whether the value is that of this tensor, and not of another whose memory it shares."""
        return True

    def handle(self, ref: StateRef, like: Tensor) -> VirtualTensor:
        """Returns a virtual tensor on the state tensor `ref`, with shape and dtype of `like`."""
        return VirtualTensor(Cell(OnWorkers(self, ref), ACCELERATOR), like)

    def promise(self, meta: Tensor, placement: str | None = None) -> VirtualTensor:
        """Returns a virtual tensor on a new temporary of the workers, freed there when the controller frees it."""
        outbox = self.session.outbox
        ref = StateRef("session", "temporary", str(outbox.new_id()))
        value = OnWorkers(StateHolder(self.session, placement), ref)
        weakref.finalize(value, outbox.release, ReleaseState((ref,)))
        return VirtualTensor(Cell(value, ACCELERATOR), meta)

    def run_operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an ATen operation on the workers; NotImplemented if it has no rule for that."""
        if func is torch.ops.aten.equal.default and args[0].size() != args[1].size():
            return False  # libraries look for a parameter among others in this way
        rule = shard_rules(func).state
        if rule is None or torch.Tag.nondeterministic_seeded in func.tags or torch.Tag.inplace_view in func.tags:
            return NotImplemented
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(_is_worker_argument(tensor) for tensor in tensors):
            return NotImplemented
        if rule is StateRule.CHECKED:
            return self._unscale(*args, **kwargs)
        values = [tensor._cell.value for tensor in tensors if isinstance(tensor, VirtualTensor)]
        placements = {value.placement() for value in values if isinstance(value, OnWorkers)} - {None}
        if placements and (len(placements) > 1 or rule is StateRule.COMBINED):
            return NotImplemented
        placement = next(iter(placements), None)
        if kwargs.get("device") is not None:
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}

        aliases_input = func._schema.is_mutable
        if not all(isinstance(tensor._cell.value, OnWorkers) for tensor in written_arguments(func, args, kwargs)):
            return NotImplemented
        metas = () if aliases_input else func(*meta_of(args), **meta_of(kwargs))
        result = tree_map_only(Tensor, lambda meta: self.promise(meta, placement), metas)
        refs: Any = tuple(as_argument(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        sent_args, sent_kwargs = tree_map_only(Tensor, as_argument, (args, kwargs))
        self.session.outbox.post(RunOperation(f"{func._opname}.{func._overloadname}", sent_args, sent_kwargs, refs))
        if not aliases_input:
            return result
        return args[0] if len(func._schema.returns) == 1 else None

    def _unscale(self, gradients: list[Any], found: Any, inverse_scale: Any) -> Any:
        """Has the workers unscale gradients; `found`, which says whether one is not finite, stays there until read."""
        values = [gradient._cell.value for gradient in gradients if isinstance(gradient, VirtualTensor)]
        refs = tuple(value.ref for value in values if isinstance(value, OnWorkers))
        return self.unscale(refs, found, inverse_scale) if len(refs) == len(gradients) else NotImplemented

    def unscale(self, refs: tuple[StateRef, ...], found: Any, inverse_scale: Any) -> Any:
        """Has the workers unscale the gradients of these names; NotImplemented if `found` cannot stay there."""
        if not isinstance(found, VirtualTensor) or found._cell.has_views:
            return NotImplemented
        outbox = self.session.outbox
        value = ReadOnce(StateHolder(self.session), StateRef("session", "found", str(outbox.new_id())))
        weakref.finalize(value, outbox.release, ReleaseState((value.ref,)))
        what = (as_argument(found), as_argument(inverse_scale))
        outbox.post(UnscaleGradients(outbox.list_id(refs), *what, value.ref))
        found._cell.value = value
        return None


def leave_other_models(tensors: Iterable[VirtualTensor]) -> None:
    """Gives each tensor whose memory is that of another model's tensor a copy of its own; a warning says so."""
    values = [(tensor, tensor._cell.value) for tensor in tensors]
    shared = [one for one, value in values if isinstance(value, OnWorkers) and not value.owner.is_own(value, one)]
    for tensor in shared:
        with torch.no_grad():
            tensor._use(tensor.detach().clone()._cell)  # type: ignore[attr-defined]
    if shared:
        warnings.warn(
            "tensors that share the memory of another model's (`average.data = buffer.data`) are copies from now on; "
            "assign them again after that model has changed",
            stacklevel=2,
        )


def bring_here(session: Session, tensors: Iterable[VirtualTensor]) -> None:
    """Has the controller keep the values of tensors that the workers keep; waits, for some of them at a time."""
    groups: list[list[VirtualTensor]] = [[]]
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.numel() * tensor.element_size()
        if num_bytes > _READ_BYTES and groups[-1]:
            groups.append([])
            num_bytes = tensor.numel() * tensor.element_size()
        groups[-1].append(tensor)
    for group in groups:
        refs = tuple(tensor._cell.value.ref for tensor in group)  # type: ignore[attr-defined]
        values = session.read_state(refs) if group else []
        for tensor, value in zip(group, values, strict=True):
            tensor._cell.value = Here(value)


class GradientsByName(Protocol):
    """The gradients of a model's parameters on the workers."""

    def get(self, name: str) -> Tensor | None: ...

    def refs(self, names: Iterable[str]) -> tuple[StateRef, ...]: ...

    def names(self) -> frozenset[str]: ...

    def clear(self, names: Iterable[str]) -> None: ...

    def set(self, name: str, gradient: Tensor | None) -> None: ...

    def add(self, name: str, gradient: Tensor) -> None: ...


class ModelOnWorkers(Protocol):
    """The interface of a model that its tensors need."""

    parameters: dict[str, VirtualTensor]
    buffers: dict[str, VirtualTensor]

    def placement_of(self, name: str) -> str | None: ...

    def note_structure(self) -> None: ...

    def is_released(self) -> bool: ...


class ModelState(StateHolder):
    """Holds the parameters and buffers of one model, whose `gradients` know which exist.

    Attributes:
        gradients: The gradients of its parameters.
        lists: Lists of its parameters that the script has handed over, see `parameter_gradients`.
        norms: The holder of norms of its gradients.
    """

    gradients: GradientsByName

    def __init__(self, session: Session, model: ModelOnWorkers) -> None:
        super().__init__(session)
        self._model = model  # lives as long as one of its parameters
        self.lists: dict[tuple[int, int], Any] = {}
        self.norms = StateHolder(session)

    def live_model(self) -> Any:
        """The model of these parameters."""
        if self._model.is_released():
            raise RuntimeError("this parameter belongs to a model that has left the accelerator")
        return self._model

    def no_longer_keeps(self, value: Any) -> None:
        self.live_model().note_structure()

    def is_own(self, value: Any, tensor: Tensor) -> bool:
        tensors = self._model.parameters if value.ref.kind == "param" else self._model.buffers
        return value.ref.kind not in ("param", "buffer") or tensors.get(value.ref.name) is tensor

    def keeps_gradient(self, value: Any) -> bool:
        return bool(value.ref.kind == "param")

    def in_order(self) -> InOrder:
        here = [one for one in self._model.parameters.values() if isinstance(one, VirtualTensor)]  # others have left
        values = [(one._cell.value, one.nbytes) for one in here]
        return [(value.ref, num_bytes) for value, num_bytes in values if isinstance(value, OnWorkers)]

    def placement_of(self, ref: StateRef) -> str | None:
        return self.live_model().placement_of(ref.name) if ref.kind != "buffer" else None

    def gradient_of(self, value: Any) -> Tensor | None:
        return self.gradients.get(value.ref.name)

    def set_gradient(self, value: Any, gradient: Tensor | None) -> None:
        self.gradients.set(value.ref.name, gradient)

    def add_gradient(self, value: Any, gradient: Tensor) -> None:
        self.gradients.add(value.ref.name, gradient)


def _is_worker_argument(tensor: Tensor) -> bool:
    if not isinstance(tensor, VirtualTensor):
        return tensor.dim() == 0
    value = tensor._cell.value
    return isinstance(value, OnWorkers) or (isinstance(value, Here) and tensor.dim() == 0)


def as_argument(tensor: Tensor) -> StateRef | TensorData:
    """Returns a tensor as a command has it: the name under which the workers keep it, or its value, read if need be."""
    if isinstance(tensor, VirtualTensor) and isinstance(tensor._cell.value, OnWorkers):
        return tensor._cell.value.ref
    return TensorData.of(tensor.to_host() if isinstance(tensor, VirtualTensor) else tensor)
