"""One plan that was looked at, with its estimates.

Decides when a plan fits. Must not know which plans are looked at, or how bytes and seconds are estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.memory_footprint import MemoryEstimate
from moreh_ap.planner.cost.step_estimate import StepEstimate
from moreh_ap.planner.search.planning_task import Task

__all__ = ["Candidate", "evaluate_plan"]


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at.

    Attributes:
        plan: The plan.
        memory: Bytes that its fullest device would hold.
        usable_bytes: Bytes that it may reserve on a device.
        step: Seconds of a step; None for a plan that does not fit, which the search does not time.
        usable_host_bytes: Bytes of host memory that it may take for a device.
    """

    plan: Plan
    memory: MemoryEstimate
    usable_bytes: float
    step: StepEstimate | None = None
    usable_host_bytes: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether it takes no more than it may, on the device and of host memory."""
        return self.memory.reserved_bytes <= self.usable_bytes and self._fits_host

    @property
    def _fits_host(self) -> bool:
        return self.plan.offload != "all" or self.memory.host_bytes <= self.usable_host_bytes

    @property
    def rejected(self) -> str:
        """Why it cannot be chosen, empty if it can."""
        if self.fits:
            return ""
        if not self._fits_host:
            needed, usable = _gib(self.memory.host_bytes), _gib(self.usable_host_bytes)
            return f"needs {needed} GiB of host memory for a device, {usable} GiB are usable"
        return f"needs {_gib(self.memory.reserved_bytes)} GiB on a device, {_gib(self.usable_bytes)} GiB are usable"

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; only for a candidate that was timed."""
        assert self.step is not None
        return self.step.total_s


def evaluate_plan(task: Task, plan: Plan) -> Candidate:
    """Returns one plan's candidate, with its time whether it fits or not.

    Raises:
        PlanError: The plan is for another number of devices, or has more stages than the model has blocks.
    """
    if plan.num_devices != task.cluster.num_devices:
        raise PlanError(
            f"plan={str(plan)!r} needs {plan.num_devices} devices, there are {task.cluster.num_devices}",
            f"replicate x shard x tensor x pipeline = {task.cluster.num_devices}",
            f'plan="replicate={task.cluster.num_devices}"',
        )
    plan.stage_ranges(task.profile.num_blocks)
    return Candidate(plan, task.memory_of(plan), task.usable_bytes, task.step_of(plan), task.usable_host_bytes)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
