"""Which shard of a parameter a worker holds after tensor parallelism.

Decides how local elements map to elements of the whole. Must not know torch, models, or who splits what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Range = tuple[int, int]
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that is whole in every dim but one, of which it has some ranges, one after the other.

    Attributes:
        shape: Shape of the whole tensor.
        dim: The dim that is split.
        ranges: What is here of that dim: [start, stop) in the whole, in local order, without overlap.
        writes: Whether this worker contributes its shard when the full tensor is put together: exactly one of the
            workers that hold the same shard does.

    Example:
        >>> TensorLayout((6, 4), dim=0, ranges=((0, 1), (3, 4))).pieces(range(1, 2))
        [((slice(3, 4, None), slice(0, 4, None)), (slice(0, 1, None), slice(0, 4, None)))]
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]
    writes: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        length = sum(stop - start for start, stop in self.ranges)
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 :])

    def pieces(self, rows: range | None = None) -> list[tuple[Slices, Slices]]:
        """Returns which slices of the whole tensor are which slices here.

        Args:
            rows: Rows (dim 0) of the local tensor that are wanted; None for all. Local slices count from `rows.start`,
                as in a shard that holds just these rows.
        """
        local = self.local_shape
        rows = range(local[0]) if rows is None else rows
        found = []
        offset = 0
        for start, stop in self.ranges:
            first, last = offset, offset + stop - start
            offset = last
            whole_slices, local_slices = [slice(0, n) for n in self.shape], [slice(0, n) for n in local]
            whole_slices[0], local_slices[0] = slice(rows.start, rows.stop), slice(0, len(rows))
            if self.dim == 0:
                first, last = max(first, rows.start), min(last, rows.stop)
                start += first - (offset - (stop - start))
                whole_slices[0] = slice(start, start + last - first)
                local_slices[0] = slice(first - rows.start, last - rows.start)
            else:
                whole_slices[self.dim], local_slices[self.dim] = slice(start, stop), slice(first, last)
            if first < last and len(rows):
                found.append((tuple(whole_slices), tuple(local_slices)))
        return found


def shard_range(size: int, degree: int, rank: int) -> Range:
    """Returns the range of `size` elements that `rank` has: all but the last ranks have the same number.

    The rule of `torch.chunk` and of DTensor, so that uneven shards can cross through a DTensor.
    """
    length = -(-size // degree)
    return min(rank * length, size), min((rank + 1) * length, size)


def shifted(ranges: Iterable[Range], offset: int) -> tuple[Range, ...]:
    """Returns the ranges moved by `offset`."""
    return tuple((start + offset, stop + offset) for start, stop in ranges)
