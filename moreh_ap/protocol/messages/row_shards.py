"""Row-sharded tensors: each worker holds its rows of a large tensor, and runs operations on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moreh_ap.protocol.messages.tensors import TensorData


@dataclass(frozen=True)
class RunOnRowShards:
    """Run an ATen operation on row shards; the results are kept under the numbers in `outputs`.

    Operands are given as `RowShardRef`, `OutputRef`, `LocalRowsOf`, `Expanded`, `LocalNumRows` and `TensorData`. With
    `sums` the results are summed over the data-parallel workers, and every worker has the full result after that. The
    reply has a `LeafReply` for each result that is unsharded and small and None for the others; it is None from every
    worker but the sender.
    """

    func: str
    arguments: Any
    keyword_arguments: Any
    outputs: tuple[int, ...]
    sums: bool


@dataclass(frozen=True)
class ReadRowShard:
    """Reply with a `LeafReply` of this worker's row shard; None from every worker but the sender."""

    number: int


@dataclass(frozen=True)
class WriteRowShard:
    """Set a row-sharded tensor from its full value."""

    number: int
    full: TensorData


@dataclass(frozen=True)
class ReleaseRowShards:
    """Free these row shards."""

    numbers: tuple[int, ...]
