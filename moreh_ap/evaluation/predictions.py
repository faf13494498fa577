"""Predictions for tables of measured training runs.

Decides what is predicted of a row, and when a device counts as full. Must not look at what was measured in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from moreh_ap.evaluation.expert_parallelism import all_to_all_s, state_bytes
from moreh_ap.evaluation.run_table import Run, run_of
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.memory_footprint import estimate_memory
from moreh_ap.planner.cost.step_time import estimate_step

__all__ = ["PREDICTED_COLUMNS", "is_full", "predict"]

PREDICTED_COLUMNS = (
    "predicted_allocated_gib",
    "predicted_reserved_gib",
    "predicted_fits",
    "predicted_step_time_s",
    "predicted_tokens_per_s_per_gpu",
)
"""Columns that `predict` adds to a row."""

RETRY_S = 0.9
"""Seconds of a micro-batch that go to the allocator where memory is full: it gives back what it keeps in reserve, which
waits for the device, and asks for it again. Fitted on the sweep; such a plan counts as too large.
Published configurations are taken to fit, whatever we think, since they are published."""

RETRY_FRACTION = 0.895
"""Fraction of a device's memory from which on that happens."""


def predict(row: Mapping[str, str], coefficients: Coefficients = COEFFICIENTS) -> dict[str, str]:
    """Returns the predicted columns of one row.

    Raises:
        MorehError: The row lacks something, or describes what cannot be; the text says what.
    """
    run = run_of(row)
    memory = estimate_memory(run.profile, run.plan, run.global_batch, run.system, coefficients)
    logged = estimate_memory(run.profile, run.plan, run.global_batch, run.system, coefficients, position=0)
    step = estimate_step(run.profile, run.plan, run.global_batch, run.cluster, run.system, coefficients)
    step_s, more_bytes = step.total_s, 0.0
    if run.experts is not None:
        rows = run.plan.rows_per_micro_batch(run.global_batch)
        step_s += all_to_all_s(run.experts, run.profile, run.plan, rows, run.cluster, run.system)
        more_bytes = state_bytes(run.experts, run.plan, run.system)
    if memory.reserved_bytes > run.cluster.device.memory_bytes * RETRY_FRACTION and not row.get("source"):
        step_s += RETRY_S * run.plan.micro_batches
    fits = memory.reserved_bytes + more_bytes <= run.cluster.device.usable_bytes
    return dict(
        zip(
            PREDICTED_COLUMNS,
            (
                f"{(logged.allocated_bytes + more_bytes) / 2**30:.3f}",
                f"{(logged.reserved_bytes + more_bytes) / 2**30:.3f}",
                str(fits),
                f"{step_s:.5f}",
                f"{step.tokens / step_s / step.num_devices:.3f}",
            ),
        )
    )


def is_full(run: Run, coefficients: Coefficients = COEFFICIENTS) -> bool:
    """Returns whether a run fills a device so far that the allocator gives back and asks again. See `RETRY_S`."""
    memory = estimate_memory(run.profile, run.plan, run.global_batch, run.system, coefficients)
    return memory.reserved_bytes > run.cluster.device.memory_bytes * RETRY_FRACTION
