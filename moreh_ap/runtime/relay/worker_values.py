"""What all workers answered to a command, of which each value is read when it is asked for.

Decides when an answer is unpickled: what many workers say once for all of them, what each says differently when a
caller asks for that worker. Must not know what the answers mean, nor how they travelled.
"""

from __future__ import annotations

import io
import pickle
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from moreh_ap.protocol.encoding import pack
from moreh_ap.runtime.relay.answers import Column, JoinedAnswers
from moreh_ap.runtime.relay.worker_answer import DONE, Answer, from_wire
from moreh_ap.runtime.relay.written_answers import LIST, OTHER

Each = TypeVar("Each")


class _InRankOrder(Sequence[Each]):
    """One value a worker, made when it is asked for."""

    @overload
    def __getitem__(self, index: int) -> Each: ...
    @overload
    def __getitem__(self, index: slice) -> list[Each]: ...
    def __getitem__(self, index: int | slice) -> Each | list[Each]:
        if isinstance(index, slice):
            return [self._of(rank) for rank in range(*index.indices(len(self)))]
        return self._of(range(len(self))[index])

    @abstractmethod
    def _of(self, rank: int) -> Each:
        """Returns the value of a worker."""


class Beside:
    """Stands, in `ItemValues.templates`, for bytes that workers do not have in common."""

    def __init__(self, column: Column) -> None:
        self.column = column


class ItemValues(_InRankOrder[Any]):
    """What all workers answered to one command of a message, in rank order.

    Args:
        columns: The pickles, and what is beside them.
    """

    def __init__(self, columns: list[Column]) -> None:
        self._columns = columns
        self._varying = [column for column in columns if not column.is_same]
        self._read: dict[tuple[int, ...], Any] = {}
        self._templates: list[Any] | None = None

    def __len__(self) -> int:
        return self._columns[0].count

    def _of(self, rank: int) -> Any:
        key = tuple([column.which(rank) for column in self._varying])
        if key not in self._read:
            beside = [column.part(rank) for column in self._columns[1:]]
            self._read[key] = _unpickled(self._columns[0].part(rank), beside)
        return self._read[key]

    def distinct(self) -> Sequence[Any]:
        """Returns the different answers, each once."""
        if not self._varying:
            return self[:1]
        ranks = {tuple([column.which(rank) for column in self._varying]): rank for rank in range(len(self))}
        return [self[rank] for rank in ranks.values()]

    def templates(self) -> list[Any]:
        """Returns the answers whose pickles differ, with a `Beside` for bytes that workers do not have in common."""
        if self._templates is None:
            heads = self._columns[0]
            beside = [column.distinct[0] if column.is_same else Beside(column) for column in self._columns[1:]]
            firsts = heads.distinct if heads.block is None else list(heads.parts())
            self._templates = [_unpickled(head, beside) for head in firsts]
        return self._templates

    def numbers(self) -> bytes:
        """Returns which template each worker's answer has."""
        numbers = self._columns[0].numbers
        return b"" if numbers is None else numbers.tobytes()


class WorkerValues(_InRankOrder[Any]):
    """What all workers answered to a message, in rank order.

    Args:
        items: Of each command in it.
        is_list: Whether an answer is the list of these, else it is the only one.
    """

    def __init__(self, items: list[ItemValues], num_workers: int, *, is_list: bool) -> None:
        self._items, self._num_workers, self._is_list = items, num_workers, is_list

    def __len__(self) -> int:
        return self._num_workers

    def _of(self, rank: int) -> Any:
        return [item[rank] for item in self._items] if self._is_list else self._items[0][rank]

    def item(self, index: int) -> ItemValues:
        """Returns what all workers answered to one command of the message."""
        return self._items[index]


class WorkerAnswers(_InRankOrder[Answer]):
    """The answers of all workers to a message, in rank order.

    Args:
        joined: As they travelled.
    """

    def __init__(self, joined: JoinedAnswers) -> None:
        self._items = joined.items()

    def __len__(self) -> int:
        return self._items[0][0].count

    def _of(self, rank: int) -> Answer:
        kind = self._items[0][0].part(rank)
        if kind[:1] == OTHER:
            return from_wire(pickle.loads(kind[1:]))
        count = int(kind[1:])
        items = [ItemValues(columns)[rank] for columns in self._items[1 : 1 + count]]
        return Answer(DONE, pack(items if kind[:1] == LIST else items[0]))

    def values(self) -> WorkerValues | None:
        """Returns the results; None where a worker answered something else, or answers are of different lengths."""
        kinds = self._items[0][0]
        if not kinds.is_same or kinds.distinct[0][:1] == OTHER:
            return None
        items = [ItemValues(columns) for columns in self._items[1:]]
        return WorkerValues(items, len(self), is_list=kinds.distinct[0][:1] == LIST)


def first_answer(parts: list[bytes]) -> Answer:
    """Returns the answer that travelled alone."""
    joined = JoinedAnswers([1])
    joined.take(0, parts)
    return WorkerAnswers(joined)[0]


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, beside: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._beside = beside

    def persistent_load(self, pid: int) -> Any:
        return self._beside[pid]


def _unpickled(data: bytes, beside: Sequence[Any]) -> Any:
    return _Unpickler(data, beside).load() if beside else pickle.loads(data)
