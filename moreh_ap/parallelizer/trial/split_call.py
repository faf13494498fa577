"""A call as its split verdict says it has to run: on which rows, and with what around the forward.

Decides how each part of a verdict changes a call. Must not know how the verdict was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.rng.shared_draws import Share
from moreh_ap.parallelizer.row_dims.kept_rows import KeptRows, shapes_of
from moreh_ap.parallelizer.row_dims.own_entries import OwnEntries
from moreh_ap.parallelizer.row_dims.row_steps import Gathering
from moreh_ap.parallelizer.trial.split_verdict import SplitVerdict
from moreh_ap.protocol.batch import row_range, rows_along
from moreh_ap.protocol.messages.calls import UNSPLIT
from moreh_ap.protocol.objects.items import Items

Dims = tuple[int | None, ...]
"""For each leaf of the arguments, the dim along which its rows lie; None if it has no rows."""


class Batch(NamedTuple):
    """The rows of a call's arguments.

    Attributes:
        rows: Rows of the batch; None if no input has rows, or if the batch is split by items that are none.
        carried: For each tensor input whether its dim 0 counts the rows, and is cut before the forward.
    """

    rows: int | None
    carried: list[bool]


def why_whole(workers: int, pieces: int, reason: str) -> str:
    """Returns what the script is told of a call that is not shared for a reason; "" if it would not be anyway.

    Args:
        workers: How many workers share the batch.
        pieces: Into how many micro-batches it is cut.
        reason: The reason, as the end of a sentence.
    """
    if workers * pieces == 1:
        return ""
    return f"{UNSPLIT if workers > 1 else 'The batch is not cut into micro-batches'}: {reason}"


def batch_of(
    verdict: SplitVerdict,
    batch: Batch,
    tensors: Sequence[Tensor],
    leaves: Sequence[Any],
    num_workers: int,
    items: Items | None,
) -> tuple[SplitVerdict, Batch]:
    """Returns the rows that workers share under a verdict, and the verdict that holds for them.

    Args:
        verdict: The verdict on calls of this kind.
        batch: The rows as the sizes of the tensors suggest them.
        tensors: The tensor inputs.
        leaves: The leaves of the arguments, these tensors among them.
        num_workers: How many workers share the batch.
        items: The items of the arguments, where the batch may be split by them.
    """
    if verdict.items is not None:  # the forward selects its items itself
        are_rows = items is not None and items.row_length is not None
        return verdict, Batch(items.count if items is not None and are_rows else None, [False] * len(tensors))
    if verdict.dims is None:
        return verdict, batch
    if not any(verdict.dims) and not verdict.steps:  # all rows lie along dim 0, but other inputs have that size too
        with_rows = {id(leaf) for leaf, dim in zip(leaves, verdict.dims) if dim == 0}
        return replace(verdict, dims=None), Batch(batch.rows, [id(tensor) in with_rows for tensor in tensors])
    # The forward cuts its arguments and gathers its results.
    found = Batch(rows_along(leaves, verdict.dims), [False] * len(tensors))
    if found.rows is None or found.rows < num_workers:
        reason = f"{UNSPLIT}: the inputs do not have as many rows as each other"
        return SplitVerdict.unsplit(reason), found
    return verdict, found


def split_call(
    call: Call, verdict: SplitVerdict, rows: int | None, first_dims: Dims, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, Share | None]:
    """Returns the call under a verdict, and the rows that this worker computes; None if it computes all, or items.

    Args:
        call: The call, unsplit.
        verdict: The verdict on it.
        rows: Rows of the batch; None if no input has rows.
        first_dims: The dims of rows as the sizes of the tensors suggest them.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    if verdict.items is not None:
        return replace(call, mode="split", kinds=(), items=verdict.items), None
    if not (verdict.split or verdict.kept or verdict.steps):
        return call, None
    assert rows is not None  # without rows a call is neither split, nor given numbers of its rows, nor gathered
    share = None
    if verdict.split:
        start, stop = row_range(call.axis.rank, call.axis.size, rows)
        lacks_rows = start == stop
        if lacks_rows:
            start = call.axis.rank % rows
            stop = start + 1
        share = Share(start, stop, rows)
        call = replace(
            call,
            mode="split",
            kinds=verdict.kinds,
            means=verdict.means,
            rules=verdict.rules,
            joined=verdict.joined,
            placed=verdict.placed(rows),
            parts=verdict.parts,
            lacks_rows=lacks_rows,
            extensions=tuple(extension.knowing(verdict.attributes) for extension in call.extensions),
        )
    if verdict.kept:
        call = replace(call, extensions=(KeptRows(verdict.kept, rows, shapes_of(args, kwargs)), *call.extensions))
    if verdict.entries and share is not None:
        own = OwnEntries(verdict.entries).of_rows(share.start, share.stop)
        call = replace(call, extensions=(*call.extensions, own))
    if verdict.steps:
        dims, cuts = verdict.dims or first_dims, verdict.dims is not None
        call = replace(call, gathering=Gathering(verdict.steps, dims, rows, cuts, verdict.in_order))
    return call, share
