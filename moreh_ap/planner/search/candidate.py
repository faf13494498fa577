"""One plan that was looked at, with its estimates.

Decides when a plan fits. Must not know which plans are looked at, or how bytes and seconds are estimated.
"""

from __future__ import annotations

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
    """

    plan: Plan
    memory: MemoryEstimate
    usable_bytes: float
    step: StepEstimate | None = None

    @property
    def fits(self) -> bool:
        """Whether it reserves no more than it may."""
        return self.memory.reserved_bytes <= self.usable_bytes

    @property
    def rejected(self) -> str:
        """Why it cannot be chosen, empty if it can."""
        if self.fits:
            return ""
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
    return Candidate(plan, task.memory_of(plan), task.usable_bytes, task.step_of(plan))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
