"""Large tensors that a script computes from a call's outputs, left where they are: each worker has its rows of them.

Decides what such a tensor is in the controller: a value that is read when somebody looks at it, and until then a name
under which workers run operations (`part_rules`).

[Note: views]
A worker's view of a part is a view there too, so that operations in place reach both. A view in the controller is a
`View` of its base like any other, and in addition has the name of the workers' view, for as long as the base is still
what it was a view of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from moreh_ap.device.values import Cell, Value, View
from moreh_ap.protocol.batch import BatchRows
from moreh_ap.protocol.messages.row_shards import ReadPart, ReleaseParts, WritePart
from moreh_ap.protocol.messages.tensors import LeafReply, OutputRef, PartRef, TensorData
from moreh_ap.session.outbox import Posted
from moreh_ap.session.session import Session


@dataclass(frozen=True)
class Located:
    """Where the parts of a tensor are: the name that workers know them by, and whose rows (None: each has all)."""

    ref: PartRef | OutputRef
    batch: BatchRows | None


@runtime_checkable
class InParts(Protocol):
    """A value of which workers may have parts."""

    @property
    def session(self) -> Session: ...

    def located(self) -> Located | None: ...


class PartValue(Value):
    """A tensor of which workers hold parts, until nobody here has it any more.

    Args:
        session: Where the workers are.
        ref: What workers know it by, or are about to.
        batch: Whose rows they have; None: each has all of it.
        num_bytes: Of the whole tensor.
        reply: The answer to the command that made it.
        index: Which of the results in the answer it is.
    """

    __slots__ = ("_index", "_located", "_number", "_reply", "_seen", "num_bytes", "session")

    session: Session

    def __init__(
        self,
        session: Session,
        ref: PartRef,
        batch: BatchRows | None,
        num_bytes: int,
        reply: Posted | None = None,
        index: int = 0,
    ) -> None:
        self.session, self._located, self.num_bytes = session, Located(ref, batch), num_bytes
        self._number = ref.number
        self._reply, self._index = reply, index
        self._seen: Tensor | None = None
        weakref.finalize(self, session.outbox.release, ReleaseParts((ref.number,)))

    def located(self) -> Located:
        """Where the parts are."""
        return self._located

    @property
    def stays(self) -> bool:  # type: ignore[override]
        """Large parts stay; what is whole and small comes with the answer, and is an ordinary value from then on."""
        return self._reply is None

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        return self.session.extensions.run_on_row_shards

    def ready(self) -> bool:
        return self._reply is not None and self._reply.done()

    def read(self) -> Tensor:
        if self._reply is not None:
            answers = [answer[self._index] for answer in self._reply.result() if answer is not None]
            return LeafReply.join(answers)
        if self._seen is None:
            replies = self.session.outbox.submit(ReadPart(self._number)).result()
            self._seen = LeafReply.join([reply for reply in replies if reply is not None])
            self.session.traffic.moved(self.num_bytes)
        return self._seen

    def write(self, tensor: Tensor) -> None:
        self.session.outbox.submit(WritePart(self._number, TensorData.of(tensor)))
        self.session.traffic.moved(self.num_bytes)
        self._seen = None

    def changed_there(self) -> None:
        """Workers changed it in place."""
        self._seen = None


class PartView(View):
    """A view of a tensor whose parts are on the workers. See [Note: views].

    Args:
        base: What it is a view of.
        view: Applies the view to the whole base.
        part: The workers' views.
    """

    __slots__ = ("_of", "_part")

    def __init__(self, base: Cell, view: Callable[[Tensor], Tensor], part: PartValue) -> None:
        super().__init__(base, view)
        self._of, self._part = base.value, part

    def runner(self) -> Callable[[Any, Any, Any], Any] | None:
        return self._part.runner() if self.located() is not None else None

    def located(self) -> Located | None:
        """Where the workers' views are, while they are views of what the base still is."""
        if self.base.value is not self._of:
            return None
        base_is_current = not isinstance(self._of, PartView) or self._of.located() is not None
        return self._part.located() if base_is_current else None

    @property
    def session(self) -> Session:
        """Where the workers are."""
        return self._part.session

    def root(self) -> Value:
        """What the view, through other views, is a view of."""
        return self._of.root() if isinstance(self._of, PartView) else self._of


def part_ref_of(value: PartValue | PartView, batch: BatchRows | None) -> PartRef | None:
    """The name of a tensor on the workers, if each has the same rows of it as of another one (None: has all)."""
    where = value.located()
    return where.ref if where is not None and isinstance(where.ref, PartRef) and where.batch == batch else None
