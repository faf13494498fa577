"""Row-sharded tensors: large tensors that a script computes from a call's outputs, of which each worker keeps its rows.

Decides what such a tensor is in the controller: a value that is read when the script reads it, and until then a number
under which workers run operations (`row_shard_rules`).

[Note: views]
A view of a row shard is a view on the worker too, so that operations in place change both. In the controller it is a
`View` of its base like any other. In addition it keeps the number of the workers' view, which is valid until the base
gets another value.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moreh_ap.device.values import Cell, Value, View
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.messages.row_shards import ReadRowShard, ReleaseRowShards, WriteRowShard
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, RowShardRef, TensorData
from moreh_ap.runtime.relay.worker_values import ItemValues
from moreh_ap.session.calls.joined_leaves import joined_leaf
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session


@dataclass(frozen=True)
class Located:
    """Where a tensor's row shards are: their number on the workers, and the rows of each worker (None: full copies)."""

    ref: RowShardRef | OutputRef
    batch: BatchRows | None


@runtime_checkable
class HasRowShards(Protocol):
    """A value that may be row-sharded on the workers."""

    @property
    def session(self) -> Session: ...

    def located(self) -> Located | None: ...


class RowShardedValue(Value):
    """A row-sharded tensor; the workers free it when the controller's last reference is gone.

    Args:
        session: The session of the workers.
        ref: Its number on the workers.
        batch: The rows of each worker; None if each has the full tensor.
        num_bytes: Size of the full tensor.
        reply: The reply to the command that computes it.
        index: Its index among the results in the reply.
    """

    __slots__ = ("_index", "_located", "_number", "_reply", "_seen", "num_bytes", "session")

    session: Session

    def __init__(
        self,
        session: Session,
        ref: RowShardRef,
        batch: BatchRows | None,
        num_bytes: int,
        reply: Posted | None = None,
        index: int = 0,
    ) -> None:
        self.session, self._located, self.num_bytes = session, Located(ref, batch), num_bytes
        self._number = ref.number
        self._reply, self._index = reply, index
        self._seen: Tensor | None = None
        weakref.finalize(self, session.outbox.release, ReleaseRowShards((ref.number,)))

    def located(self) -> Located:
        """Where the row shards are."""
        return self._located

    @property
    def stays(self) -> bool:  # type: ignore[override]
        """Whether the value stays on the workers; a small unsharded one comes with the reply."""
        return self._reply is None

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        return self.session.extensions.run_on_row_shards

    def ready(self) -> bool:
        return self._reply is not None and self._reply.done()

    def is_order_known(self) -> bool:
        return not self.session.runs_after_answer

    def read(self) -> Tensor:
        if self._reply is not None:
            answers = self._reply.result()
            if (full := joined_leaf(answers, self._index) if isinstance(answers, ItemValues) else None) is not None:
                return full
            return LeafReply.join([answer[self._index] for answer in answers if answer is not None])
        if self._seen is None:
            replies = self.session.outbox.submit(ReadRowShard(self._number)).result()
            self._seen = LeafReply.join([reply for reply in replies if reply is not None])
            self.session.traffic.moved(self.num_bytes)
        return self._seen

    def write(self, tensor: Tensor) -> None:
        self.session.outbox.submit(WriteRowShard(self._number, TensorData.of(tensor)))
        self.session.traffic.moved(self.num_bytes)
        self._seen = None

    def changed_there(self) -> None:
        """Drops the value that was read: an operation on the workers changed it in place."""
        self._seen = None


class RowShardedView(View):
    """A view of a row-sharded tensor. See [Note: views].

    Args:
        base: The tensor that it is a view of.
        view: Applies the view to the full base.
        shard: The workers' views.
    """

    __slots__ = ("_of", "_shard")

    def __init__(self, base: Cell, view: Callable[[Tensor], Tensor], shard: RowShardedValue) -> None:
        super().__init__(base, view)
        self._of, self._shard = base.value, shard

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        return self._shard.runner() if self.located() is not None else None

    def is_order_known(self) -> bool:
        return self._shard.is_order_known()

    def located(self) -> Located | None:
        """Where the workers' views are; None once the base has another value."""
        if self.base.value is not self._of:
            return None
        base_is_current = not isinstance(self._of, RowShardedView) or self._of.located() is not None
        return self._shard.located() if base_is_current else None

    @property
    def session(self) -> Session:
        """The session of the workers."""
        return self._shard.session

    def root(self) -> Value:
        """The value that is not a view itself, through a chain of views."""
        return self._of.root() if isinstance(self._of, RowShardedView) else self._of


def row_shard_ref_of(value: RowShardedValue | RowShardedView, batch: BatchRows | None) -> RowShardRef | None:
    """The number of a tensor on the workers if they hold the rows `batch` of it (None: full copies); else None."""
    where = value.located()
    return where.ref if where is not None and isinstance(where.ref, RowShardRef) and where.batch == batch else None
