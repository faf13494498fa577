"""The one way to run a call on a worker.

Decides whether a call runs at once or waits for its backward, and whether it goes through stages. Must not know how
either is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from moreh_ap.parallelizer.call.forward import Call, ForwardPass
from moreh_ap.parallelizer.call.micro_batches import DeferredForward
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedForward
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.plan import Plan


def run_forward(
    call: Call,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    plan: Plan,
    rows: int | None = None,
    meta_module: nn.Module | None = None,
) -> ForwardPass | DeferredForward:
    """Runs a call, or prepares it where micro-batches let forward wait for backward.

    Args:
        call: What to run and how.
        args: Positional arguments: this worker's rows in "split" mode, the whole batch in "whole" mode.
        kwargs: Keyword arguments, likewise.
        plan: The plan. Its `micro_batches` is the number of pieces the worker's rows are cut into. Only a split call
            with `grad` and `kinds` is cut, and no worker gets a piece without rows.
        rows: Rows of the global batch; None if no argument has rows.
        meta_module: A copy of the module on meta without a plan, on which denominators are found for nothing.
    """
    num_chunks = 1
    if rows is not None and call.mode == "split" and call.kinds is not None:
        num_chunks = min(plan.micro_batches, rows // call.num_workers)
    if call.grad and stages_of(call.module) is not None:
        assert meta_module is not None
        return PipelinedForward(call, args, kwargs, num_chunks, rows or 0, meta_module, plan)
    if call.grad and num_chunks > 1 and rows is not None:
        return DeferredForward(call, args, kwargs, num_chunks, rows, meta_module)
    return ForwardPass(call, args, kwargs)
