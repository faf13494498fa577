"""Row-sharded tensors on a worker, and operations on them: a loss that a script computes from logits.

Decides how a worker computes its share of an operation: which rows it takes of an operand that was sent in full, the
local size of a dim, and when a sum is reduced over all workers. The controller decides which operations may run so.

[Note: held]
Logits may be held in another precision than the script was promised (`parallelizer/precision/output_precision.py`). An
operation that only moves values leaves them so; any other converts what it is given. Before values are changed in
place, all that lies in the same memory is converted for good. Many numbers that a script converts to float32 itself
stay as they are too, in the same memory, marked as another copy.

[Note: later]
Log-probabilities over many classes, what a script computes of the logits before them, and the gradients that lead back
to the logits, have no values before something needs these (`parallelizer/loss/later_operations.py`). All get theirs
before something is changed in place that one of them comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from moreh_ap.errors import ExactnessError
from moreh_ap.parallelizer.loss.later_operations import (
    held,
    in_full,
    moves_values,
    only_widens,
    run_on_later_values,
)
from moreh_ap.parallelizer.loss.later_values import LaterValues
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
from moreh_ap.runtime.worker.answers.late_replies import LateReply


@dataclass
class RowShard:
    """This worker's shard of a row-sharded tensor, or its copy of a full one.

    Attributes:
        content: This worker's rows of the tensor, or the full tensor; `LaterValues` of them. See [Note: later].
        axis: The data-parallel workers.
        rows: Rows of the global batch; None if every worker has the full tensor.
        answers: Whether this worker sends the reply for all workers that hold the same shard.
        promised: The dtype that the script was promised.
        widened: Which float32 copy this belongs to that has its values in the memory of low-precision ones; None for
            what has memory of its own.
    """

    content: Tensor | LaterValues
    axis: Axis
    rows: int | None
    answers: bool
    promised: torch.dtype
    widened: object = None

    @property
    def held(self) -> Tensor:
        """The shard as it is held, computed if it has no values yet. See [Note: held]."""
        content = self.content
        return content.values(content.held) if isinstance(content, LaterValues) else content

    @property
    def tensor(self) -> Tensor:
        """The shard in the dtype that was promised: a copy if it is held in another."""
        content = self.content
        return content.values(self.promised) if isinstance(content, LaterValues) else content.to(self.promised)

    def settle(self) -> None:
        """Gives the shard its values for good. See [Note: later]."""
        if isinstance(self.content, LaterValues):
            self.content = self.content.settle()

    def local_rows(self, full: Tensor) -> Tensor:
        """Returns this worker's rows of the full tensor."""
        return full if self.rows is None else local_entries(full, self.axis.rank, self.axis.size, self.rows)

    def local_size(self, full: int) -> int:
        """Returns the local size of a dim that has `full` entries over all workers."""
        if self.rows is None:
            return full
        start, stop = row_range(self.axis.rank, self.axis.size, self.rows)
        return full * (stop - start) // self.rows

    def reply(self) -> LeafReply | None:
        """Returns the shard as the controller gets it; None if another worker sends it."""
        if not self.answers:
            return None
        tensor, kind = in_full(self.content), "same" if self.rows is None else "rows"
        sends = kind == "rows" or self.axis.rank == 0
        is_late = sends and tensor.is_cuda and _is_small(self)
        data = bytes_of(tensor, self.promised) if sends and not is_late else b""
        reply = LeafReply(kind, tuple(tensor.shape), self.promised, False, data, order=memory_order(tensor))
        return LateReply.of(reply, tensor) if is_late else reply

    def write(self, full: Tensor) -> None:
        """Sets the shard, whose memory was converted, to this worker's rows of `full`."""
        self.held.copy_(self.local_rows(full))


def convert_memory_of(shard: RowShard, shards: Iterable[RowShard | None]) -> None:
    """Converts all of `shards` that lie in the memory of `shard` to what was promised; they go on sharing memory.

    Shards without values yet, and float32 copies that lie in the memory of others, get values of their own.
    """
    present = [other for other in shards if other is not None]
    later = [other.content for other in present if isinstance(other.content, LaterValues)]
    memory = None if isinstance(shard.content, LaterValues) else shard.content.untyped_storage().data_ptr()
    if memory is None or any(memory in content.memory() for content in later):
        for other in present:
            other.settle()
    for other in present:
        if other.widened is not None:
            _convert_alike(other, present)
    _convert_alike(shard, present)


def _convert_alike(shard: RowShard, shards: Iterable[RowShard]) -> None:
    held = shard.held
    if held.dtype == shard.promised:
        return
    memory, copy = held.untyped_storage(), shard.widened
    values = torch.empty(0, dtype=held.dtype, device=held.device).set_(memory).to(shard.promised)
    for other in shards:
        if other.widened is copy and other.held.untyped_storage().data_ptr() == memory.data_ptr():
            other.content = values.as_strided(other.held.size(), other.held.stride(), other.held.storage_offset())
            other.widened = None


Lookup = Callable[[RowShardRef | OutputRef], RowShard | None]


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
    refs = map(_ref_in, tree_leaves((command.arguments, command.keyword_arguments)))
    found = {ref: lookup(ref) for ref in dict.fromkeys(refs) if ref is not None}
    shards = {ref: shard for ref, shard in found.items() if shard is not None}
    if len(shards) < len(found):
        return None
    reference = next((shard for shard in shards.values() if shard.rows is not None), next(iter(shards.values())))
    packet, overload = command.func.rsplit(".", 1)
    operation = getattr(torch.ops.aten, packet.split("::")[-1])
    func = getattr(operation, overload)
    moves = moves_values(func)
    first = command.arguments[0] if command.arguments else None
    source = shards[first] if isinstance(first, (RowShardRef, OutputRef)) else None
    if func._schema.is_mutable:
        target = _ref_in(first)
        assert target is not None
        convert(shards[target])

    def local(node: Any) -> Any:
        if isinstance(node, (RowShardRef, OutputRef)):
            content, promised = shards[node].content, shards[node].promised
            return content if moves or isinstance(content, LaterValues) else held(content, promised)
        if isinstance(node, TensorData):
            return place(node)
        if isinstance(node, LocalRowsOf):
            return reference.local_rows(in_full(local(node.full)))
        if isinstance(node, Expanded):
            return in_full(local(node.tensor)).expand([local(size) for size in node.sizes])
        return reference.local_size(node.full) if isinstance(node, LocalNumRows) else node

    with torch.no_grad():
        widened = source.widened if moves and source is not None else None
        if source is not None and _only_widens(func, source, command):
            result, widened = source.content, object()
        else:
            arguments, keyword_arguments = tree_map(local, (command.arguments, command.keyword_arguments))
            result = run_on_later_values(func, arguments, keyword_arguments)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, (Tensor, LaterValues))]
    if command.sums and reference.rows is not None and reference.axis.size > 1:
        for output in outputs:
            dist.all_reduce(in_full(output), group=reference.axis.group)
    rows, axis, answers = None if command.sums else reference.rows, reference.axis, reference.answers
    promised = reference.promised if moves else torch.float32 if widened is not None else None
    return [RowShard(output, axis, rows, answers, promised or output.dtype, widened) for output in outputs]


def _only_widens(func: Any, source: RowShard, command: RunOnRowShards) -> bool:
    """Says whether the result of an operation is what its operand is held as. See [Note: held]."""
    content = source.content
    return isinstance(content, Tensor) and only_widens(func, content, source.promised, command.keyword_arguments)


def answer(shards: list[RowShard]) -> list[LeafReply | None]:
    """Returns what the controller gets at once: results that are unsharded and small, None for the others."""
    return [shard.reply() if shard.rows is None and _is_small(shard) else None for shard in shards]


def _ref_in(node: Any) -> RowShardRef | OutputRef | None:
    inner = node.full if isinstance(node, LocalRowsOf) else node
    return inner if isinstance(inner, (RowShardRef, OutputRef)) else None


def _is_small(shard: RowShard) -> bool:
    return shard.content.shape.numel() * shard.promised.itemsize <= MAX_INLINE_BYTES


def met_late(reason: str) -> ExactnessError:
    """Makes the error for rows that the script computes with already, of a call that turned out to need all of them."""
    return ExactnessError(
        f"{reason}, which was found out when the script had already computed with rows of its result.",
        allowed="A loss that the forward itself takes, or one that is read in every step.",
        fix="loss = model(**batch).loss",
    )
