"""One ATen operation on row shards: its operands, and how it is sent to the workers."""

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
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.tensors import (
    MAX_INLINE_BYTES,
    Expanded,
    LocalNumRows,
    LocalRowsOf,
    RowShardRef,
    TensorData,
)
from moreh_ap.session.calls.row_shard_values import HasRowShards, Located, RowShardedValue, RowShardedView
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session

Follows = Callable[[Tensor], bool]

aten = torch.ops.aten

_TOLD_BY_VALUE = (bool, int, float, str, torch.dtype, torch.memory_format)
_MOST_KNOWN = 512
_known_results: dict[Any, Any] = {}
"""Results on meta by operation and operands, see `Operation.metas`."""


@dataclass(frozen=True)
class Operation:
    """One call of an ATen operation on row-sharded operands.

    Attributes:
        session: The session of the workers.
        located: Where the row shards of an operand are, by the id of the tensor.
        batch: The rows of each worker; None if every worker has all operands in full.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    session: Session
    located: dict[int, Located]
    batch: BatchRows | None

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> Operation | None:
        """Returns the operation; None if its operands are unsharded and small, or split by different batches."""
        located: dict[int, Located] = {}
        session, largest = None, 0
        for tensor in _tensors((args, kwargs)):
            value = tensor._cell.value if isinstance(tensor, VirtualTensor) else None
            where = value.located() if isinstance(value, HasRowShards) else None
            if where is None or not isinstance(value, HasRowShards):
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
        """Yields the operands."""
        return _tensors((self.args, self.kwargs))

    def argument(self, name: str) -> Any:
        """Returns an argument by its name in the schema, the default if it was not given."""
        position = self._position(name)
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.func._schema.arguments[position].default_value)

    def having(self, **arguments: Any) -> Operation:
        """Returns the operation with other values of some arguments."""
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
        """Returns the results on meta.

        Losses run on meta by functions of Python, for milliseconds, so what a step computes for the second time is
        known by its operands' shapes.
        """
        key = (self.func, _known_by(self.args), _known_by(self.kwargs))
        if self.func.is_view or None in key:
            return self._run_on_meta()
        if key not in _known_results:
            if len(_known_results) >= _MOST_KNOWN:
                _known_results.clear()
            _known_results[key] = self._run_on_meta()
        return tree_map_only(Tensor, _made_like, _known_results[key])

    def _run_on_meta(self) -> Any:
        return self.func(*operations.meta_of(self.args), **operations.meta_of(self.kwargs))

    def has_rows(self, tensor: Tensor) -> bool:
        """Returns whether the operand is row-sharded."""
        where = self.located.get(id(tensor))
        return where is not None and where.batch is not None

    def counts_rows(self, size: int) -> bool:
        """Returns whether a dim of this size may count rows of the batch, or a fixed number of entries for each row."""
        return self.batch is None or (size > 0 and size % self.batch.total == 0)

    def aligned(self, shape: torch.Size) -> bool:
        """Returns whether dim 0 of every row-sharded operand has the rows after broadcasting to `shape`."""
        return all(
            tensor.dim() == len(shape) and tensor.shape[0] == shape[0] and self.counts_rows(shape[0])
            for tensor in self.tensors()
            if self.has_rows(tensor)
        )

    # -- sending -----------------------------------------------------------------------------------------------------

    def run(
        self, follows: Follows, *, sums: bool = False, sent: tuple[Any, Any] | None = None, packet: Any = None
    ) -> Any:
        """Runs the operation on the workers, which keep the results; returns these.

        Args:
            follows: Returns for an operand whether its dim 0 has the rows.
            sums: Whether the results are summed over the workers.
            sent: The arguments for the workers, if they differ from the script's.
            packet: The operation for the workers, if it differs.
        """
        metas = self.metas()
        outputs = [leaf for leaf in tree_leaves(metas) if isinstance(leaf, Tensor)]
        refs = [RowShardRef(self.session.outbox.new_id()) for _ in outputs]
        reply = self._post(follows, tuple(ref.number for ref in refs), sums, sent, packet)
        batch = None if sums else self.batch
        values = []
        for number, (ref, meta) in enumerate(zip(refs, outputs)):
            comes_along = batch is None and _num_bytes(meta) <= MAX_INLINE_BYTES
            answer = reply if comes_along else None
            values.append(RowShardedValue(self.session, ref, batch, _num_bytes(meta), answer, number))
        if self.func.is_view:
            return self._views(metas, values)
        left = iter(values)
        return tree_map_only(Tensor, lambda meta: VirtualTensor(Cell(next(left), ACCELERATOR), meta), metas)

    def run_in_place(self, follows: Follows) -> None:
        """Runs an in-place operation on the workers."""
        self._post(follows, (), sums=False)

    def _views(self, metas: Any, values: list[RowShardedValue]) -> Any:
        base = next(self.tensors())
        assert isinstance(base, VirtualTensor)
        base._cell.has_views = True
        func, rest, kwargs = self.func, self.args[1:], self.kwargs

        def view_of(base_value: Tensor, index: int | None) -> Tensor:
            result = func(base_value, *rest, **kwargs)
            return result if index is None else result[index]

        if isinstance(metas, Tensor):
            view = RowShardedView(base._cell, functools.partial(view_of, index=None), values[0])
            return VirtualTensor(Cell(view, ACCELERATOR), metas)
        views = []
        for number, (meta, value) in enumerate(zip(metas, values)):
            view = RowShardedView(base._cell, functools.partial(view_of, index=number), value)
            views.append(VirtualTensor(Cell(view, ACCELERATOR), meta))
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
        return self.session.outbox.post_soon(RunOnRowShards(name, args, kwargs, outputs, sums))

    def _encode(self, tensor: Tensor, follows: Follows) -> Any:
        has_rows = self.batch is not None and tensor.dim() > 0 and follows(tensor)
        where = self.located.get(id(tensor))
        if where is not None:
            return LocalRowsOf(where.ref) if has_rows and where.batch is None else where.ref
        small = _collapsed(tensor)
        data = TensorData.of(small.host_value() if isinstance(small, VirtualTensor) else small)
        repeats_rows = small.dim() > 0 and small.shape[0] != tensor.shape[0]
        operand = LocalRowsOf(data) if has_rows and not repeats_rows else data
        if small.shape == tensor.shape:
            return operand
        return Expanded(operand, (LocalNumRows(tensor.shape[0]) if has_rows else tensor.shape[0], *tensor.shape[1:]))


def _made_like(meta: Tensor) -> Tensor:
    return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device="meta")


def _known_by(value: Any) -> Any:
    """Returns a key of operands: equal keys give results of equal shapes and dtypes. None if none is known."""
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, list)):
        parts = tuple(map(_known_by, value))
        return None if None in parts else (type(value), parts)
    kind = type(value)
    return (kind, value) if value is None or kind in _TOLD_BY_VALUE else None


def like(shape: torch.Size) -> Follows:
    """Returns a rule: operands with as many dims and the same size of dim 0 have the rows in dim 0."""
    return lambda tensor: tensor.dim() == len(shape) and tensor.shape[0] == shape[0]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _collapsed(tensor: Tensor) -> Tensor:
    """Returns the tensor without expanded dims: an expanded gradient is one number."""
    if not isinstance(tensor, VirtualTensor) or not isinstance(tensor._cell.value, Here):
        return tensor
    host = tensor._cell.value.tensor
    for dim in range(host.dim()):
        if host.stride(dim) == 0 and host.shape[dim] > 1:
            host = host.narrow(dim, 0, 1)
    # A copy: a dim of one element may have any stride.
    return tensor if host is tensor._cell.value.tensor else host.clone(memory_format=torch.contiguous_format)
