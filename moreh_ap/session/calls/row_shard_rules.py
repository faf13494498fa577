"""Which operations run on parts of large tensors, and how the arguments of each worker differ from the script's.

Decides that an operation on rows is the same whether the rows are together or not, or, for sums over all of them, how
it becomes one; whatever is not known to be so is declined, and then read and computed by the controller. This is below
autograd: backward's operations come here like any other. Must not know what a worker does with its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
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
from moreh_ap.session.calls.row_shards import InParts, Located, PartValue, PartView
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session

Follows = Callable[[Tensor], bool]

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # the values of `reduction` in ATen
_DIM_NAMES = frozenset({"dim", "dims", "dim0", "dim1"})
_HAS_ONE_DIM_MORE = {aten.unsqueeze, aten.stack}


def run_on_parts(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an ATen operation of which workers have operands in parts; NotImplemented where it is declined."""
    operation = Operation.of(func, args, kwargs)
    if operation is None or torch.Tag.nondeterministic_seeded in func.tags:
        return NotImplemented
    if func._schema.is_mutable:
        return _in_place(operation)
    rule = _RULES.get(func.overloadpacket, _elementwise if torch.Tag.pointwise in func.tags else None)
    return NotImplemented if rule is None else rule(operation)


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


def _like(shape: torch.Size) -> Follows:
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


def _divided(tensor: Tensor, by: Any) -> Tensor:
    func = aten.div.Tensor if isinstance(by, Tensor) else aten.div.Scalar
    result: Tensor = operations.run(func, (tensor, by), {})
    return result


def _dims_of(operation: Operation) -> list[int] | None:
    """The dims that an operation works along, counted from the first; None if it works along all of them."""
    first = next(operation.tensors())
    num_dims = first.dim() + (operation.func.overloadpacket in _HAS_ONE_DIM_MORE)
    found: list[int] = []
    for argument in operation.func._schema.arguments:
        if argument.name not in _DIM_NAMES:
            continue
        dims = operation.argument(argument.name)
        if dims is None or dims == []:
            return None
        found += [dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)]
    return found or None


# -- rules -------------------------------------------------------------------------------------------------------------


def _elementwise(operation: Operation) -> Any:
    metas = operation.metas()
    if not isinstance(metas, Tensor) or not operation.aligned(metas.shape):
        return NotImplemented
    return operation.run(_like(metas.shape))


def _in_place(operation: Operation) -> Any:
    """``scores.masked_fill_(mask, 0)``: where the memory is the workers' own, and not a call's output."""
    func, target = operation.func, operation.args[0]
    value = target._cell.value if isinstance(target, VirtualTensor) else None
    root = value.root() if isinstance(value, PartView) else value
    functional = getattr(aten, func._opname.removesuffix("_"), None)
    overload = getattr(functional, func._overloadname, None)
    is_known = overload is not None and torch.Tag.pointwise in overload.tags and func._opname.endswith("_")
    if not (is_known and isinstance(root, PartValue) and operation.aligned(target.shape)):
        return NotImplemented
    operation.run_in_place(_like(target.shape))
    root.changed_there()
    return target


def _along_other_dims(operation: Operation) -> Any:
    """Softmax, sorting, slices: every row by itself, as long as dim 0 is not the one that is worked along."""
    first = next(operation.tensors())
    dims = _dims_of(operation)
    if dims is None or (operation.batch is not None and 0 in dims) or not operation.aligned(first.shape):
        return NotImplemented
    return operation.run(_like(first.shape))


def _total(operation: Operation) -> Any:
    """Sums and means: along other dims row by row, over the rows as a sum of the workers' sums."""
    first, dims = operation.args[0], _dims_of(operation)
    if not operation.aligned(first.shape):
        return NotImplemented
    if operation.batch is None or (dims is not None and 0 not in dims):
        return operation.run(_like(first.shape))
    if operation.func.overloadpacket is aten.sum:
        return operation.run(_like(first.shape), sums=True)
    mean = operation.metas()
    func = getattr(aten.sum, "dim_IntList" if operation.func._overloadname == "dim" else "default")
    total = run_on_parts(func, operation.args, {**operation.kwargs, "dtype": mean.dtype})
    return _divided(total, first.numel() / mean.numel()) if mean.dtype.is_floating_point else NotImplemented


def _loss(operation: Operation) -> Any:
    """Losses that are a sum, or mean, of one number an element."""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in operation.tensors()))
    if not operation.aligned(shape):
        return NotImplemented
    reduction = operation.argument("reduction")
    if reduction == _NONE:
        return operation.run(_like(shape))
    total = operation.having(reduction=_SUM).run(_like(shape), sums=True)
    return total if reduction == _SUM else _divided(total, shape.numel())


def _loss_backward(operation: Operation) -> Any:
    shape = operation.argument("self").shape
    if operation.argument("reduction") == _MEAN:
        gradient = _divided(operation.argument("grad_output"), shape.numel())
        operation = operation.having(grad_output=gradient, reduction=_SUM)
    return operation.run(_like(shape)) if operation.aligned(shape) else NotImplemented


def _class_loss(operation: Operation) -> Any:
    """Negative log-likelihood: the sum of targets' scores, by the sum of their weights where the mean is wanted."""
    scores, target, reduction = operation.args[0], operation.argument("target"), operation.argument("reduction")
    if not _share_rows(operation, scores, target):
        return NotImplemented

    def follows(tensor: Tensor) -> bool:
        return tensor is scores or tensor is target

    if reduction == _NONE:
        return operation.run(follows)
    total, weight = operation.having(reduction=_SUM).run(follows, sums=True)
    return (_divided(total, weight) if reduction == _MEAN else total), weight


def _class_loss_backward(operation: Operation) -> Any:
    gradient, scores, target = (operation.argument(name) for name in ("grad_output", "self", "target"))
    if not _share_rows(operation, scores, target):
        return NotImplemented
    return operation.run(lambda tensor: any(tensor is one for one in (gradient, scores, target)))


def _share_rows(operation: Operation, scores: Tensor, target: Tensor) -> bool:
    # One row's scores alone have no dim for rows.
    return scores.dim() > 1 and target.shape[0] == scores.shape[0] and operation.counts_rows(scores.shape[0])


def _new_sizes(operation: Operation) -> Any:
    """Views and new tensors of a size: as long as dim 0 counts rows before and after."""
    source, result = operation.args[0], operation.metas()
    names = [argument.name for argument in operation.func._schema.arguments]
    name = "size" if "size" in names else "input_sizes"
    is_expanded = operation.func.overloadpacket is aten.expand
    if is_expanded and (result.dim() != source.dim() or result.shape[0] != source.shape[0]):
        return NotImplemented
    counts = all(tensor.dim() and operation.counts_rows(tensor.shape[0]) for tensor in (source, result))
    if not counts or 0 in result.shape or (operation.batch is not None and 0 in (_dims_of(operation) or ())):
        return NotImplemented
    sizes = [NumRows(result.shape[0]), *result.shape[1:]]
    sent = operation.having(**{name: sizes})
    # A view of the whole may not be one of a part whose memory is laid out otherwise.
    packet = aten.reshape if operation.func.overloadpacket in (aten.view, aten._unsafe_view) else None
    return operation.run(lambda tensor: tensor is source, sent=(sent.args, sent.kwargs), packet=packet)


def _permuted(operation: Operation) -> Any:
    dims = [dim % operation.args[0].dim() for dim in operation.argument("dims")]
    if operation.batch is not None and dims[0] != 0:
        return NotImplemented
    return operation.run(lambda tensor: True)


def _copied(operation: Operation) -> Any:
    """Changes of dtype or memory format."""
    return operation.run(lambda tensor: True)


def _table(*entries: tuple[Callable[[Operation], Any], Iterable[Any]]) -> dict[Any, Callable[[Operation], Any]]:
    return {packet: rule for rule, packets in entries for packet in packets}


_RULES = _table(
    (
        _along_other_dims,
        [
            *(aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data),
            *(aten.logsumexp, aten.amax, aten.amin, aten.max, aten.min, aten.argmax, aten.argmin, aten.topk, aten.sort),
            *(aten.var, aten.std, aten.any, aten.all, aten.prod, aten.linalg_vector_norm, aten.cumsum, aten.cumprod),
            *(aten.logcumsumexp, aten.gather, aten.scatter, aten.scatter_add, aten.flip, aten.roll),
            *(aten.cat, aten.stack),
            *(aten.slice, aten.select, aten.unsqueeze, aten.squeeze, aten.transpose, aten.unbind),
            *(aten.split, aten.split_with_sizes),
        ],
    ),
    (_total, [aten.sum, aten.mean]),
    (
        _loss,
        [
            *(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss),
            *(aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits),
        ],
    ),
    (
        _loss_backward,
        [
            *(aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward),
            *(aten.soft_margin_loss_backward, aten.binary_cross_entropy_backward),
        ],
    ),
    (_class_loss, [aten.nll_loss_forward, aten.nll_loss2d_forward]),
    (_class_loss_backward, [aten.nll_loss_backward, aten.nll_loss2d_backward]),
    (
        _new_sizes,
        [
            *(aten.view, aten._unsafe_view, aten.expand, aten.slice_backward, aten.select_backward),
            *(aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full),
        ],
    ),
    (_permuted, [aten.permute]),
    (_copied, [aten._to_copy, aten.clone, aten.zeros_like, aten.ones_like, aten.empty_like, aten.full_like]),
)
