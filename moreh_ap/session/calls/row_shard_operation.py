"""One ATen operation on row shards: what is known of its operands, and how it is sent to the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from moreh_ap.device import operations
from moreh_ap.device.tensor import ACCELERATOR, VirtualTensor
from moreh_ap.device.values import Cell, Here
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.messages.row_shards import RunOnParts
from moreh_ap.protocol.messages.tensors import MAX_INLINE_BYTES, Expanded, NumRows, PartRef, RowsOf, TensorData
from moreh_ap.session.calls.row_shard_values import InParts, Located, PartValue, PartView
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session

Follows = Callable[[Tensor], bool]

aten = torch.ops.aten


@dataclass(frozen=True)
class Operation:
    """One call of an ATen operation, with what is known of its operands.

    Attributes:
        session: Where the workers are.
        located: Where the parts of an operand are, by the id of the tensor.
        batch: Whose rows they are; None if every worker has all of each.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    session: Session
    located: dict[int, Located]
    batch: BatchRows | None

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> Operation | None:
        """The operation; None if its operands are whole and small, or if their rows are shared in different ways."""
        located: dict[int, Located] = {}
        session, largest = None, 0
        for tensor in _tensors((args, kwargs)):
            value = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
            where = value.located() if isinstance(value, InParts) else None
            if where is None or not isinstance(value, InParts):
                continue
            located[id(tensor)] = where
            session, largest = value.session, max(largest, _num_bytes(tensor))
        batches = {where.batch for where in located.values()} - {None}
        if session is None or len(batches) > 1 or (not batches and largest <= MAX_INLINE_BYTES):
            return None
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "layout")}
        operation = cls(func, tuple(args), kwargs, session, located, next(iter(batches), None))
        return operation if operation._sends_less_than_it_reads() else None

    def _sends_less_than_it_reads(self) -> bool:
        stays = sum(_num_bytes(tensor) for tensor in self.tensors() if id(tensor) in self.located)
        travels = sum(_num_bytes(_collapsed(tensor)) for tensor in self.tensors() if id(tensor) not in self.located)
        return travels <= stays

    def tensors(self) -> Iterator[Tensor]:
        """Its operands."""
        return _tensors((self.args, self.kwargs))

    def argument(self, name: str) -> Any:
        """The value of an argument by its name in the schema, its default if it was not given."""
        position = self._position(name)
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.func._schema.arguments[position].default_value)

    def having(self, **arguments: Any) -> Operation:
        """The same with other values of some arguments."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in arguments.items():
            position = self._position(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return Operation(self.func, tuple(args), kwargs, self.session, self.located, self.batch)

    def _position(self, name: str) -> int:
        return [argument.name for argument in self.func._schema.arguments].index(name)

    def metas(self) -> Any:
        """The results without values."""
        return self.func(*operations.meta_of(self.args), **operations.meta_of(self.kwargs))

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether a worker has only its rows of the operand."""
        where = self.located.get(id(tensor))
        return where is not None and where.batch is not None

    def counts_rows(self, size: int) -> bool:
        """Whether a dim of this size may count rows of the batch, or entries of them."""
        return self.batch is None or (size > 0 and size % self.batch.total == 0)

    def aligned(self, shape: torch.Size) -> bool:
        """Whether, broadcast to `shape`, dim 0 has the rows of every operand that workers have rows of."""
        return all(
            tensor.dim() == len(shape) and tensor.shape[0] == shape[0] and self.counts_rows(shape[0])
            for tensor in self.tensors()
            if self.has_rows(tensor)
        )

    # -- sending -----------------------------------------------------------------------------------------------------

    def run(
        self, follows: Follows, *, sums: bool = False, sent: tuple[Any, Any] | None = None, packet: Any = None
    ) -> Any:
        """Has the workers run it; returns the results, which they keep.

        Args:
            follows: Says of an operand whether its dim 0 has the rows.
            sums: Whether results are to be summed over the workers.
            sent: Arguments as workers get them, where they differ.
            packet: What workers run instead of the operation.
        """
        metas = self.metas()
        outputs = [leaf for leaf in tree_leaves(metas) if isinstance(leaf, Tensor)]
        refs = [PartRef(self.session.outbox.new_id()) for _ in outputs]
        reply = self._post(follows, tuple(ref.number for ref in refs), sums, sent, packet)
        batch = None if sums else self.batch
        values = []
        for number, (ref, meta) in enumerate(zip(refs, outputs)):
            comes_along = batch is None and _num_bytes(meta) <= MAX_INLINE_BYTES
            answer = reply if comes_along else None
            values.append(PartValue(self.session, ref, batch, _num_bytes(meta), answer, number))
        if self.func.is_view:
            return self._views(metas, values)
        left = iter(values)
        return tree_map_only(Tensor, lambda meta: VirtualTensor(Cell(next(left), ACCELERATOR), meta), metas)

    def run_in_place(self, follows: Follows) -> None:
        """Has the workers run it for what it changes."""
        self._post(follows, (), sums=False)

    def _views(self, metas: Any, values: list[PartValue]) -> Any:
        base = next(self.tensors())
        assert isinstance(base, VirtualTensor)
        base._cell.has_views = True
        func, rest, kwargs = self.func, self.args[1:], self.kwargs

        def view_of(whole: Tensor, index: int | None) -> Tensor:
            result = func(whole, *rest, **kwargs)
            return result if index is None else result[index]

        if isinstance(metas, Tensor):
            part = PartView(base._cell, functools.partial(view_of, index=None), values[0])
            return VirtualTensor(Cell(part, ACCELERATOR), metas)
        views = []
        for number, (meta, value) in enumerate(zip(metas, values)):
            part = PartView(base._cell, functools.partial(view_of, index=number), value)
            views.append(VirtualTensor(Cell(part, ACCELERATOR), meta))
        return views

    def _post(
        self,
        follows: Follows,
        outputs: tuple[int, ...],
        sums: bool,
        sent: tuple[Any, Any] | None = None,
        packet: Any = None,
    ) -> Posted:
        def encode(leaf: Any) -> Any:
            return self._encode(leaf, follows) if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(encode, sent or (self.args, self.kwargs))
        func = self.func if packet is None else packet.default
        name = f"{func._opname}.{func._overloadname}"
        return self.session.outbox.post_soon(RunOnParts(name, args, kwargs, outputs, sums))

    def _encode(self, tensor: Tensor, follows: Follows) -> Any:
        has_rows = self.batch is not None and tensor.dim() > 0 and follows(tensor)
        where = self.located.get(id(tensor))
        if where is not None:
            return RowsOf(where.ref) if has_rows and where.batch is None else where.ref
        small = _collapsed(tensor)
        data = TensorData.of(small.host_value() if isinstance(small, VirtualTensor) else small)
        repeats_rows = small.dim() > 0 and small.shape[0] != tensor.shape[0]
        operand = RowsOf(data) if has_rows and not repeats_rows else data
        if small.shape == tensor.shape:
            return operand
        return Expanded(operand, (NumRows(tensor.shape[0]) if has_rows else tensor.shape[0], *tensor.shape[1:]))


def like(shape: torch.Size) -> Follows:
    """Operands of as many dims with the same dim 0 have the rows in it."""
    return lambda tensor: tensor.dim() == len(shape) and tensor.shape[0] == shape[0]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _collapsed(tensor: Tensor) -> Tensor:
    """The tensor without what it repeats: an expanded gradient is one number."""
    if not isinstance(tensor, VirtualTensor) or not isinstance(tensor._cell.value, Here):
        return tensor
    host = tensor._cell.value.tensor
    for dim in range(host.dim()):
        if host.stride(dim) == 0 and host.shape[dim] > 1:
            host = host.narrow(dim, 0, 1)
    # Of its own memory: a dim of one element may have any stride.
    return tensor if host is tensor._cell.value.tensor else host.clone(memory_format=torch.contiguous_format)
