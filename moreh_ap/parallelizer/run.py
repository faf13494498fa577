"""The one way to run a call on a worker.

Decides whether a call runs at once or waits for its backward. Must not know how either is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moreh_ap.parallelizer.forward import Call, ForwardPass
from moreh_ap.parallelizer.micro_batches import DeferredForward


def run_forward(
    call: Call,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    micro_batches: int = 1,
    rows: int | None = None,
    meta_module: nn.Module | None = None,
) -> ForwardPass | DeferredForward:
    """Runs a call, or prepares it where micro-batches let forward wait for backward.

    Args:
        call: What to run and how.
        args: Positional arguments: this worker's rows in "split" mode, the whole batch in "whole" mode.
        kwargs: Keyword arguments, likewise.
        micro_batches: Number of pieces the worker's rows are cut into. Only a split call with `grad` and `kinds`
            is cut, and no worker gets a piece without rows.
        rows: Rows of the global batch; needed with `micro_batches` above 1.
        meta_module: A copy of the module on meta without a plan, on which denominators are found for nothing.
    """
    if rows is not None:
        micro_batches = min(micro_batches, rows // call.num_workers)
    if micro_batches > 1 and rows is not None and call.grad and call.mode == "split" and call.kinds is not None:
        return DeferredForward(call, args, kwargs, micro_batches, rows, meta_module)
    return ForwardPass(call, args, kwargs)
