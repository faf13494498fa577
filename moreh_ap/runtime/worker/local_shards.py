"""Large tensors of which each worker holds its rows, and operations on them: a loss that a script computes from logits.

Decides what a worker's part of an operation is: which rows of an operand that came whole, how long a dim is here, when
a sum is one over all workers. Which operations may be run so is for the controller to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.protocol.batch import own_entries, row_range
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.row_shards import RunOnParts
from moreh_ap.protocol.messages.tensors import (
    MAX_INLINE_BYTES,
    Expanded,
    LeafReply,
    NumRows,
    OutputRef,
    PartRef,
    RowsOf,
    TensorData,
    bytes_of,
)


@dataclass(frozen=True)
class Part:
    """What this worker has of a tensor.

    Attributes:
        tensor: Its rows of the tensor, or all of it.
        axis: The workers that share the batch.
        rows: Rows of the batch; None if the tensor is whole here.
        answers: Whether this worker speaks for all that have the same part.
    """

    tensor: Tensor
    axis: Axis
    rows: int | None
    answers: bool

    def own_rows(self, whole: Tensor) -> Tensor:
        """This worker's rows of a tensor that is whole."""
        return whole if self.rows is None else own_entries(whole, self.axis.rank, self.axis.size, self.rows)

    def num_entries(self, whole: int) -> int:
        """How long a dim is here that has `whole` entries over all workers."""
        if self.rows is None:
            return whole
        start, stop = row_range(self.axis.rank, self.axis.size, self.rows)
        return whole // self.rows * (stop - start)

    def reply(self) -> LeafReply | None:
        """The part as it travels; None from a worker that does not speak."""
        if not self.answers:
            return None
        tensor, kind = self.tensor, "same" if self.rows is None else "rows"
        data = bytes_of(tensor) if kind == "rows" or self.axis.rank == 0 else b""
        return LeafReply(kind, tuple(tensor.shape), tensor.dtype, False, data, order=memory_order(tensor))

    def write(self, whole: Tensor) -> None:
        """Sets the part to this worker's rows of `whole`."""
        self.tensor.copy_(self.own_rows(whole))


Lookup = Callable[[PartRef | OutputRef], Part | None]


def run_on_parts(command: RunOnParts, lookup: Lookup, place: Callable[[TensorData], Tensor]) -> list[Part] | None:
    """The results of an operation on this worker, in order; None if it has no part in it.

    Args:
        command: The operation.
        lookup: What this worker has of a tensor; None if nothing.
        place: Puts a tensor that came with the command on the device.
    """
    nodes = tree_leaves((command.arguments, command.keyword_arguments))
    parts = [lookup(ref) for ref in map(_ref_in, nodes) if ref is not None]
    if any(part is None for part in parts):
        return None
    leader = next((part for part in parts if part is not None and part.rows is not None), parts[0])
    assert leader is not None

    def local(node: Any) -> Any:
        if isinstance(node, (PartRef, OutputRef)):
            part = lookup(node)
            assert part is not None
            return part.tensor
        if isinstance(node, TensorData):
            return place(node)
        if isinstance(node, RowsOf):
            return leader.own_rows(local(node.whole))
        if isinstance(node, Expanded):
            return local(node.tensor).expand([local(size) for size in node.sizes])
        return leader.num_entries(node.whole) if isinstance(node, NumRows) else node

    arguments, keyword_arguments = tree_map(local, (command.arguments, command.keyword_arguments))
    packet, overload = command.func.rsplit(".", 1)
    func = getattr(getattr(torch.ops.aten, packet.split("::")[-1]), overload)
    with torch.no_grad():
        result = func(*arguments, **keyword_arguments)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not command.sums:
        return [Part(output, leader.axis, leader.rows, leader.answers) for output in outputs]
    if leader.rows is not None and leader.axis.size > 1:
        for output in outputs:
            dist.all_reduce(output, group=leader.axis.group)
    return [Part(output, leader.axis, None, leader.answers) for output in outputs]


def answer(parts: list[Part]) -> list[LeafReply | None]:
    """What the controller is told of results at once: those that are whole and small."""
    return [part.reply() if part.rows is None and _is_small(part.tensor) else None for part in parts]


def _ref_in(node: Any) -> PartRef | OutputRef | None:
    inner = node.whole if isinstance(node, RowsOf) else node
    return inner if isinstance(inner, (PartRef, OutputRef)) else None


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= MAX_INLINE_BYTES
