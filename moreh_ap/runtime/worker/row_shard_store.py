"""Row-sharded tensors on a worker, and operations on them: a loss that a script computes from logits.

Decides how a worker computes its share of an operation: which rows it takes of an operand that was sent in full, the
local size of a dim, and when a sum is reduced over all workers. The controller decides which operations may run so.
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
from moreh_ap.protocol.batch import local_entries, row_range
from moreh_ap.protocol.memory_format import memory_order
from moreh_ap.protocol.messages.row_shards import RunOnRowShards
from moreh_ap.protocol.messages.tensors import (
    MAX_INLINE_BYTES,
    Expanded,
    LeafReply,
    LocalNumRows,
    LocalRowsOf,
    OutputRef,
    RowShardRef,
    TensorData,
    bytes_of,
)


@dataclass(frozen=True)
class RowShard:
    """This worker's shard of a row-sharded tensor, or its copy of a full one.

    Attributes:
        tensor: This worker's rows of the tensor, or the full tensor.
        axis: The data-parallel workers.
        rows: Rows of the global batch; None if every worker has the full tensor.
        answers: Whether this worker sends the reply for all workers that hold the same shard.
    """

    tensor: Tensor
    axis: Axis
    rows: int | None
    answers: bool

    def local_rows(self, full: Tensor) -> Tensor:
        """Returns this worker's rows of the full tensor."""
        return full if self.rows is None else local_entries(full, self.axis.rank, self.axis.size, self.rows)

    def local_size(self, full: int) -> int:
        """Returns the local size of a dim that has `full` entries over all workers."""
        if self.rows is None:
            return full
        start, stop = row_range(self.axis.rank, self.axis.size, self.rows)
        return full // self.rows * (stop - start)

    def reply(self) -> LeafReply | None:
        """Returns the shard as the controller gets it; None if another worker sends it."""
        if not self.answers:
            return None
        tensor, kind = self.tensor, "same" if self.rows is None else "rows"
        data = bytes_of(tensor) if kind == "rows" or self.axis.rank == 0 else b""
        return LeafReply(kind, tuple(tensor.shape), tensor.dtype, False, data, order=memory_order(tensor))

    def write(self, full: Tensor) -> None:
        """Sets the shard to this worker's rows of `full`."""
        self.tensor.copy_(self.local_rows(full))


Lookup = Callable[[RowShardRef | OutputRef], RowShard | None]


def run_on_row_shards(
    command: RunOnRowShards, lookup: Lookup, place: Callable[[TensorData], Tensor]
) -> list[RowShard] | None:
    """Returns this worker's shards of the results, in order; None if it lacks an operand.

    Args:
        command: The operation.
        lookup: Returns this worker's shard of a tensor; None if it has none.
        place: Copies a tensor that came with the command to the device.
    """
    nodes = tree_leaves((command.arguments, command.keyword_arguments))
    shards = [lookup(ref) for ref in map(_ref_in, nodes) if ref is not None]
    if any(shard is None for shard in shards):
        return None
    reference = next((shard for shard in shards if shard is not None and shard.rows is not None), shards[0])
    assert reference is not None

    def local(node: Any) -> Any:
        if isinstance(node, (RowShardRef, OutputRef)):
            shard = lookup(node)
            assert shard is not None
            return shard.tensor
        if isinstance(node, TensorData):
            return place(node)
        if isinstance(node, LocalRowsOf):
            return reference.local_rows(local(node.full))
        if isinstance(node, Expanded):
            return local(node.tensor).expand([local(size) for size in node.sizes])
        return reference.local_size(node.full) if isinstance(node, LocalNumRows) else node

    arguments, keyword_arguments = tree_map(local, (command.arguments, command.keyword_arguments))
    packet, overload = command.func.rsplit(".", 1)
    func = getattr(getattr(torch.ops.aten, packet.split("::")[-1]), overload)
    with torch.no_grad():
        result = func(*arguments, **keyword_arguments)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if not command.sums:
        return [RowShard(output, reference.axis, reference.rows, reference.answers) for output in outputs]
    if reference.rows is not None and reference.axis.size > 1:
        for output in outputs:
            dist.all_reduce(output, group=reference.axis.group)
    return [RowShard(output, reference.axis, None, reference.answers) for output in outputs]


def answer(shards: list[RowShard]) -> list[LeafReply | None]:
    """Returns what the controller gets at once: results that are unsharded and small, None for the others."""
    return [shard.reply() if shard.rows is None and _is_small(shard.tensor) else None for shard in shards]


def _ref_in(node: Any) -> RowShardRef | OutputRef | None:
    inner = node.full if isinstance(node, LocalRowsOf) else node
    return inner if isinstance(inner, (RowShardRef, OutputRef)) else None


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= MAX_INLINE_BYTES
