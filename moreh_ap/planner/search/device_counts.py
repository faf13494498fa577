"""Whether fewer devices than there are would be faster, and how many.

Decides which numbers of devices are compared, and by how much a smaller one has to be faster. Must not know how a task
on fewer devices is described (the caller does), nor how workers are started.

[Note: fewer devices]
More devices compute a step faster, but sums of gradients take longer with more members, a batch of few rows leaves
devices without a row of their own, and CPU workers share cores. So the fastest plans of smaller numbers are compared
with the fastest plan of all devices. The one with all devices is kept unless another is clearly faster.
"""

from __future__ import annotations

from collections.abc import Callable

from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import TIE_MARGIN, Ranking

__all__ = ["FEWER_MARGIN", "faster_on_fewer", "smaller_counts"]

FEWER_MARGIN = 0.15
"""The part of a step's time that fewer devices have to save. Above the mean error of predicted times (11 %,
`docs/planner.md`), since other workers have to be started. A choice of ours."""


def smaller_counts(num_devices: int, rows: int, least: int = 1) -> tuple[int, ...]:
    """Returns the numbers of devices to compare with all of them, largest first: divisors, and one device a row.

    Args:
        num_devices: All devices.
        rows: Rows of the batch.
        least: The smallest number to look at.

    Example:
        >>> smaller_counts(8, 3)
        (4, 3, 2, 1)
    """
    counts = [count for count in range(least, num_devices) if num_devices % count == 0 or count == rows]
    return tuple(reversed(counts))


def faster_on_fewer(
    all_s: float, num_devices: int, rows: int, task_on: Callable[[int], Task | None], least: int = 1
) -> Ranking | None:
    """Returns the plans for the number of devices that is clearly faster than all; None if all are to be used.

    Among numbers whose predicted times cannot be distinguished, the largest is taken. See [Note: fewer devices].

    Args:
        all_s: Predicted seconds of a step under the chosen plan of all devices.
        num_devices: All devices.
        rows: Rows of the batch.
        task_on: Returns the same task on so many devices; None if nothing is known of so many.
        least: The smallest number to look at.
    """
    tasks = (task_on(count) for count in smaller_counts(num_devices, rows, least))
    found: Ranking | None = None
    for task in tasks:
        limit_s = all_s * (1 - FEWER_MARGIN) if found is None else found.best.seconds * (1 - TIE_MARGIN)
        if task is None or _least_s(task) >= limit_s:
            continue
        ranking = search(task)
        if ranking.num_fitting and ranking.best.seconds < limit_s:
            found = ranking
    return found


def _least_s(task: Task) -> float:
    """Returns the seconds below which no plan of a task can be: all devices compute at their peak, and nothing else."""
    cluster = task.cluster
    peak_flops = cluster.device.peak_flops(task.system.matrix_precision or task.precision)
    least_s = task.global_batch * task.profile.flops_per_row / (cluster.num_devices * peak_flops)
    return least_s * task.corrections.time
