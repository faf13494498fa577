"""Answers of many workers on their way to one message.

Decides when all have answered, and that what several say travels once. Must not know what they say.

[Note: columns]
An answer consists of items, one for each command of the message, and an item of parts: what is pickled, and beside it
the bytes of tensors. Hosts join answers part by part: a column has one part of all workers. A part that all of them
say is written once, one that some say once with a number for each worker, and parts that all differ one behind the
other. So the controller takes a column as a whole, and takes a worker's part out only when that worker's answer is
read. An answer with fewer parts than others gets empty ones, which are never read.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from collections.abc import Iterator, Sequence

_SAME, _SOME, _EACH = b"=", b"#", b"*"  # how a column is written
_NUMBER = "I"


class Column:
    """One part of the answers of several workers; see [Note: columns].

    Args:
        count: How many workers.
        distinct: What they say, each once; empty where `block` is given.
        numbers: Which of it each says; None: all say the first.
        block: What each says, one behind the other, equally long.

    Attributes:
        is_same: Whether all say the same.
    """

    __slots__ = ("block", "count", "distinct", "is_same", "numbers")

    def __init__(
        self, count: int, distinct: Sequence[bytes], numbers: array[int] | None = None, block: bytes | None = None
    ) -> None:
        self.count, self.distinct, self.numbers, self.block = count, distinct, numbers, block
        self.is_same = numbers is None and block is None

    def which(self, worker: int) -> int:
        """Returns a number that is equal for workers known to say the same."""
        if self.block is not None:
            return worker
        return 0 if self.numbers is None else self.numbers[worker]

    def part(self, worker: int) -> bytes:
        """Returns what a worker says."""
        if self.block is None:
            return self.distinct[self.which(worker)]
        size = len(self.block) // self.count
        return self.block[worker * size : (worker + 1) * size]

    def parts(self) -> Iterator[bytes]:
        """Yields what the workers say, in their order."""
        return map(self.part, range(self.count))

    def written(self) -> bytes:
        """Returns the column as it travels."""
        if self.block is not None:
            return _EACH + self.block
        if self.numbers is None:
            return written_once(self.distinct[0])
        sizes = array(_NUMBER, map(len, self.distinct))
        head = struct.pack("<I", len(sizes))
        return b"".join((_SOME, head, sizes.tobytes(), self.numbers.tobytes(), *self.distinct))

    @staticmethod
    def read(data: bytes, count: int) -> Column:
        """Returns the column of so many workers that was written."""
        kind = data[:1]
        if kind == _SAME:
            return Column(count, (data[1:],))
        if kind == _EACH:
            return Column(count, (), block=data[1:])
        (num_distinct,) = struct.unpack_from("<I", data, 1)
        sizes, numbers, begin = array(_NUMBER), array(_NUMBER), 5 + 4 * (num_distinct + count)
        sizes.frombytes(data[5 : 5 + 4 * num_distinct])
        numbers.frombytes(data[5 + 4 * num_distinct : begin])
        distinct = []
        for size in sizes:
            distinct.append(data[begin : begin + size])
            begin += size
        return Column(count, distinct, numbers)


def written_once(part: bytes) -> bytes:
    """Returns a column in which all workers say the same, or in which there is one, as it travels."""
    return _SAME + part


def joined(columns: Sequence[Column]) -> Column:
    """Returns one column for the workers of several, in their order."""
    count = sum([column.count for column in columns])
    if len({column.distinct[0] if column.is_same else None for column in columns}) == 1 and columns[0].is_same:
        return Column(count, columns[0].distinct)
    blocks = [column.block or b"" for column in columns]
    if len({len(block) / column.count for block, column in zip(blocks, columns)}) == 1 and blocks[0]:
        return Column(count, (), block=b"".join(blocks))
    table: dict[bytes, int] = {}
    numbers = array(_NUMBER)
    for column in columns:
        parts = column.distinct if column.block is None else list(column.parts())
        own = [table.setdefault(part, len(table)) for part in parts]
        if column.is_same:
            numbers.extend(own * column.count)
        else:
            numbers.extend(own if column.numbers is None else map(own.__getitem__, column.numbers))
    distinct = list(table)
    if 2 * len(distinct) > count and len(set(map(len, distinct))) == 1:
        return Column(count, (), block=b"".join(map(distinct.__getitem__, numbers)))
    return Column(count, distinct, numbers)


def written_layout(num_parts: Sequence[int]) -> bytes:
    """Returns, as it travels, of how many parts each item of an answer consists; columns follow in this order."""
    return array(_NUMBER, num_parts).tobytes()


class JoinedAnswers:
    """The answers to one command, from sources of which each answers for one worker or for several.

    Args:
        counts: For how many workers each source answers.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        self._found: list[list[bytes]] = [[]] * len(counts)
        self._left = len(counts)

    def take(self, source: int, parts: list[bytes]) -> bool:
        """Takes the answer of a source; returns whether all are in. One thread at a time calls it.

        Args:
            source: Its index.
            parts: What `written_layout` returned, and the columns as they travel.
        """
        self._found[source] = parts
        self._left -= 1
        return self._left == 0

    def missing(self) -> list[int]:
        """Returns the sources whose answer is not in."""
        return [source for source, parts in enumerate(self._found) if not parts]

    def items(self) -> list[list[Column]]:
        """Returns the columns of all workers, of each item."""
        found, total = self._found, sum(self._counts)
        layout = _layout(found[0][0])
        if len({parts[0] for parts in found}) > 1:
            layout, found = _aligned(found)
        items, at = [], 0
        for size in layout:
            columns = []
            for _ in range(size):
                at += 1
                written = [parts[at] for parts in found]
                first = written[0]
                if first[:1] == _SAME and written.count(first) == len(written):  # most
                    columns.append(Column(total, (first[1:],)))
                else:
                    columns.append(joined(list(map(Column.read, written, self._counts))))
            items.append(columns)
        return items

    def parts(self) -> list[bytes]:
        """Returns the answers as they travel on."""
        items = self.items()
        return [written_layout([len(item) for item in items]), *(column.written() for item in items for column in item)]


def _layout(data: bytes) -> array[int]:
    layout = array(_NUMBER)
    layout.frombytes(data)
    return layout


def _aligned(found: list[list[bytes]]) -> tuple[array[int], list[list[bytes]]]:
    """Returns one layout for answers with several, and the answers with as many parts."""
    layouts = [_layout(parts[0]) for parts in found]
    common = array(_NUMBER, map(max, itertools.zip_longest(*layouts, fillvalue=0)))
    return common, [_padded(layout, parts, common) for layout, parts in zip(layouts, found)]


def _padded(layout: array[int], parts: list[bytes], common: array[int]) -> list[bytes]:
    empty, begin, padded = written_once(b""), 1, parts[:1]
    for size, wanted in itertools.zip_longest(layout, common, fillvalue=0):
        padded += [*parts[begin : begin + size], *[empty] * (wanted - size)]
        begin += size
    return padded
