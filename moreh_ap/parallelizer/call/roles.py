"""How workers share a call: which of them, which rows of its arguments each has.

Must not know how that was found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from moreh_ap.parallelizer.mesh import Axis
from moreh_ap.protocol.batch import row_range
from moreh_ap.protocol.messages.tensors import LeafReply


class Roles(NamedTuple):
    """How workers share a call.

    Attributes:
        axis: The workers that share the batch.
        rows: Rows of the batch; None if no input has rows.
        carried: For each tensor input whether it has rows.
        wants_grad: For each tensor input whether its gradient is wanted.
        is_split: Whether each worker computes its rows only.
        note: Why not, or what else the user should know.
        by_values: Whether numbers among the arguments decide what is computed, which the result may follow.
        has_pictures: Whether rows of tokens have pictures, whose sizes results may have.
        num_own_rows: How many rows this worker computes; None if it computes all.
    """

    axis: Axis
    rows: int | None
    carried: Sequence[bool]
    wants_grad: tuple[bool, ...]
    is_split: bool
    note: str = ""
    by_values: bool = False
    has_pictures: bool = False
    num_own_rows: int | None = None

    @staticmethod
    def of(
        axis: Axis,
        rows: int | None,
        carried: Sequence[bool],
        wants_grad: tuple[bool, ...],
        is_split: bool,
        note: str = "",
        by_values: bool = False,
        has_pictures: bool = False,
    ) -> Roles:
        """Returns the roles in which this worker has its part of the rows, if the call is split by rows."""
        own = range(*row_range(axis.rank, axis.size, rows)) if is_split and rows is not None else None
        num_own_rows = None if own is None else len(own)
        return Roles(axis, rows, carried, wants_grad, is_split, note, by_values, has_pictures, num_own_rows)

    def vary(self, leaves: Sequence[LeafReply]) -> bool:
        """Returns whether a result with these leaves may be another, or have other sizes, for other values."""
        sizes = (leaf.shape[:1] for leaf in leaves if leaf.kind == "same")
        return self.by_values or (self.has_pictures and any(size not in ((), (self.rows,)) for size in sizes))


def with_gradients(tensors: Sequence[Tensor], wants_grad: Sequence[bool]) -> list[Tensor]:
    """Returns the tensor inputs of a call, those whose gradient is wanted as leaves of their own."""
    return [one.detach().requires_grad_() if wants else one for one, wants in zip(tensors, wants_grad, strict=True)]
