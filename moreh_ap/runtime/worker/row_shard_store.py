"""Row-sharded tensors on a worker, and operations on them: a loss that a script computes from logits.

Decides how a worker computes its share of an operation: which rows it takes of an operand that was sent in full, the
local size of a dim, and when a sum is reduced over all workers. The controller decides which operations may run so.

[Note: held]
Logits may be held in another precision than the script was promised (`parallelizer/call/output_precision.py`). An
operation that only moves values leaves them so; any other converts what it is given. Before values are changed in
place, all that lies in the same memory is converted for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


@dataclass
class RowShard:
    """This worker's shard of a row-sharded tensor, or its copy of a full one.

    Attributes:
        held: This worker's rows of the tensor, or the full tensor. See [Note: held].
        axis: The data-parallel workers.
        rows: Rows of the global batch; None if every worker has the full tensor.
        answers: Whether this worker sends the reply for all workers that hold the same shard.
        promised: The dtype that the script was promised.
    """

    held: Tensor
    axis: Axis
    rows: int | None
    answers: bool
    promised: torch.dtype

    @property
    def tensor(self) -> Tensor:
        """The shard in the dtype that was promised: a copy if it is held in another."""
        return self.held.to(self.promised)

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
        tensor, kind = self.held, "same" if self.rows is None else "rows"
        data = bytes_of(tensor, self.promised) if kind == "rows" or self.axis.rank == 0 else b""
        return LeafReply(kind, tuple(tensor.shape), self.promised, False, data, order=memory_order(tensor))

    def write(self, full: Tensor) -> None:
        """Sets the shard, whose memory was converted, to this worker's rows of `full`."""
        self.held.copy_(self.local_rows(full))


def convert_memory_of(shard: RowShard, shards: Iterable[RowShard | None]) -> None:
    """Converts all of `shards` that lie in the memory of `shard` to what was promised; they go on sharing memory."""
    if shard.held.dtype == shard.promised:
        return
    memory = shard.held.untyped_storage()
    values = torch.empty(0, dtype=shard.held.dtype, device=shard.held.device).set_(memory).to(shard.promised)
    for other in shards:
        if other is not None and other.held.untyped_storage().data_ptr() == memory.data_ptr():
            other.held = values.as_strided(other.held.size(), other.held.stride(), other.held.storage_offset())


Lookup = Callable[[RowShardRef | OutputRef], RowShard | None]

_MOVES_VALUES = {torch.ops.aten.reshape, torch.ops.aten.clone}
"""Operations whose results have the values of their operand, beside views."""


def run_on_row_shards(
    command: RunOnRowShards,
    lookup: Lookup,
    place: Callable[[TensorData], Tensor],
    convert: Callable[[RowShard], None],
) -> list[RowShard] | None:
    """Returns this worker's shards of the results, in order; None if it lacks an operand.

    Args:
        command: The operation.
        lookup: Returns this worker's shard of a tensor; None if it has none.
        place: Copies a tensor that came with the command to the device.
        convert: Converts a tensor, with all that shares its memory, before it is changed. See [Note: held].
    """
    nodes = tree_leaves((command.arguments, command.keyword_arguments))
    shards = [lookup(ref) for ref in map(_ref_in, nodes) if ref is not None]
    if any(shard is None for shard in shards):
        return None
    reference = next((shard for shard in shards if shard is not None and shard.rows is not None), shards[0])
    assert reference is not None
    packet, overload = command.func.rsplit(".", 1)
    operation = getattr(torch.ops.aten, packet.split("::")[-1])
    func = getattr(operation, overload)
    moves = (func.is_view or operation in _MOVES_VALUES) and func is not torch.ops.aten.view.dtype
    if func._schema.is_mutable:
        target = _ref_in(command.arguments[0])
        changed = None if target is None else lookup(target)
        assert changed is not None
        convert(changed)

    def local(node: Any) -> Any:
        if isinstance(node, (RowShardRef, OutputRef)):
            shard = lookup(node)
            assert shard is not None
            return shard.held if moves else shard.tensor
        if isinstance(node, TensorData):
            return place(node)
        if isinstance(node, LocalRowsOf):
            return reference.local_rows(local(node.full))
        if isinstance(node, Expanded):
            return local(node.tensor).expand([local(size) for size in node.sizes])
        return reference.local_size(node.full) if isinstance(node, LocalNumRows) else node

    arguments, keyword_arguments = tree_map(local, (command.arguments, command.keyword_arguments))
    with torch.no_grad():
        result = func(*arguments, **keyword_arguments)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if command.sums and reference.rows is not None and reference.axis.size > 1:
        for output in outputs:
            dist.all_reduce(output, group=reference.axis.group)
    rows = None if command.sums else reference.rows
    return [
        RowShard(output, reference.axis, rows, reference.answers, reference.promised if moves else output.dtype)
        for output in outputs
    ]


def answer(shards: list[RowShard]) -> list[LeafReply | None]:
    """Returns what the controller gets at once: results that are unsharded and small, None for the others."""
    return [shard.reply() if shard.rows is None and _is_small(shard) else None for shard in shards]


def _ref_in(node: Any) -> RowShardRef | OutputRef | None:
    inner = node.full if isinstance(node, LocalRowsOf) else node
    return inner if isinstance(inner, (RowShardRef, OutputRef)) else None


def _is_small(shard: RowShard) -> bool:
    return shard.held.numel() * shard.promised.itemsize <= MAX_INLINE_BYTES
