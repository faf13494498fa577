"""Which way a call is executed on a worker.

Decides whether a call runs at once or waits for its backward, and whether it goes through stages. Must not know how
either is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from moreh_ap.parallelizer.call.call import Call
from moreh_ap.parallelizer.call.execution import Execution
from moreh_ap.parallelizer.call.followed_forwards import FollowedForwards
from moreh_ap.parallelizer.call.forward import EagerForward
from moreh_ap.parallelizer.call.micro_batches import MicroBatchedForward
from moreh_ap.parallelizer.call.pipelined_forward import PipelinedForward
from moreh_ap.parallelizer.pipeline.stages import stages_of
from moreh_ap.plan import Plan

Execute = Callable[[Call, tuple[Any, ...], Mapping[str, Any]], Execution]
"""Runs a call with positional and keyword arguments: this worker's rows in "split" mode, else the whole batch."""


def way_to_execute(call: Call, plan: Plan, rows: int | None = None, meta_module: nn.Module | None = None) -> Execute:
    """Returns what runs calls like `call`, or prepares them where micro-batches let forward wait for backward.

    Args:
        call: What to run and how.
        plan: The plan. Its `micro_batches` is the number of pieces the worker's rows are cut into. Only a split call
            with `grad` and `kinds` is cut, and no worker gets a piece without rows.
        rows: Rows of the global batch; None if no argument has rows.
        meta_module: A copy of the module on meta without a plan, on which denominators are found for nothing.
    """
    num_micro_batches = 1
    if rows is not None and call.mode == "split" and call.kinds is not None:
        num_micro_batches = min(plan.micro_batches, rows // call.axis.size)
    if call.grad and stages_of(call.module) is not None:
        return partial(
            PipelinedForward,
            num_micro_batches=num_micro_batches,
            rows=rows or 0,
            known=FollowedForwards(meta_module),
            plan=plan,
        )
    if call.grad and num_micro_batches > 1 and rows is not None:
        known = FollowedForwards(meta_module)
        return partial(MicroBatchedForward, num_micro_batches=num_micro_batches, rows=rows, known=known)
    return EagerForward
