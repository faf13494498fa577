"""What is to be planned, what a search finds, and which plan is preferred.

Decides when a plan fits and in which order plans stand. Must not know which plans are looked at, or how bytes and
seconds are estimated.

[Note: simpler plans]
Differences below `INDISTINCT` are smaller than what the estimate can tell apart. Among plans within that of the
fastest, the simplest is chosen: fewest of shard, tensor and pipeline axes in use, then no recomputation, then the
plainest order, then fewest micro-batches; then time decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moreh_ap.errors import PlanError
from moreh_ap.evaluation.predictions import usable_bytes
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS, Coefficients
from moreh_ap.planner.cost.footprint import MemoryEstimate, estimate_memory
from moreh_ap.planner.cost.hardware import Cluster
from moreh_ap.planner.cost.practice import MOREH_AP, Practice
from moreh_ap.planner.cost.step_time import StepEstimate, estimate_step
from moreh_ap.planner.models.model_profile import ModelProfile
from moreh_ap.planner.search.remedies import nothing_fits
from moreh_ap.planner.search.space import Constraints

__all__ = ["INDISTINCT", "Candidate", "Corrections", "Ranking", "Task", "rank", "weigh"]

INDISTINCT = 0.02
"""Part of a step's time that the estimate cannot tell apart. A choice of ours; the estimate's own error against
measured runs is larger (`docs/planner.md`), but much of it is common to all plans of a model."""


@dataclass(frozen=True)
class Corrections:
    """By what factors earlier runs on a machine took more than was predicted, or less.

    Attributes:
        time: Of the seconds of a step.
        memory: Of the bytes of a device.
    """

    time: float = 1.0
    memory: float = 1.0


@dataclass(frozen=True)
class Task:
    """What is to be planned.

    Attributes:
        profile: The model.
        cluster: The devices.
        global_batch: Rows of a step.
        constraints: What the user's options leave.
        practice: How the program that executes the plan keeps state.
        coefficients: Constants of the estimates.
        corrections: What was learned of the estimates on this machine.
    """

    profile: ModelProfile
    cluster: Cluster
    global_batch: int
    constraints: Constraints = field(default_factory=Constraints)
    practice: Practice = MOREH_AP
    coefficients: Coefficients = COEFFICIENTS
    corrections: Corrections = Corrections()

    @property
    def usable_bytes(self) -> float:
        """What of a device a plan may reserve."""
        ratio = self.constraints.memory_usage_correction_ratio
        device = self.cluster.device
        return usable_bytes(device) if ratio is None else device.memory_bytes * ratio / 100

    @property
    def precision(self) -> str:
        """The precision of every plan."""
        return "bf16" if self.constraints.mixed_precision and self.cluster.device.native_bf16 else "fp32"

    def with_usable(self, num_bytes: float) -> Task:
        """Returns the same task for devices of which a plan may reserve at most so many bytes."""
        device = self.cluster.device
        smaller = replace(device, memory_bytes=device.memory_bytes * min(1.0, num_bytes / self.usable_bytes))
        return replace(self, cluster=replace(self.cluster, device=smaller))

    def memory_of(self, plan: Plan) -> MemoryEstimate:
        """Returns what the fullest device holds under a plan."""
        estimate = estimate_memory(self.profile, plan, self.global_batch, self.practice, self.coefficients)
        return estimate if self.corrections.memory == 1.0 else estimate.scaled(self.corrections.memory)

    def step_of(self, plan: Plan) -> StepEstimate:
        """Returns how long a step takes under a plan."""
        estimate = estimate_step(
            self.profile, plan, self.global_batch, self.cluster, self.practice, self.coefficients
        )  # fmt: skip
        return estimate if self.corrections.time == 1.0 else estimate.scaled(self.corrections.time)


@dataclass(frozen=True)
class Candidate:
    """One plan that was looked at.

    Attributes:
        plan: The plan.
        memory: What its fullest device would hold.
        usable_bytes: What it may reserve.
        step: Where the time of a step would go; None for a plan that does not fit, which the search does not time.
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


@dataclass(frozen=True)
class Ranking:
    """What a search found.

    Attributes:
        task: What was searched for.
        candidates: Plans looked at, best first, those that do not fit last.
        num_fitting: How many fit.
        left_out: How many plans were settled without a closer look, by reason.
        prepare_s: How long it took to find plans and estimate their memory.
        select_s: How long it took to estimate the time of those that fit, and to rank them.
    """

    task: Task
    candidates: tuple[Candidate, ...]
    num_fitting: int
    left_out: Mapping[str, int]
    prepare_s: float
    select_s: float

    @property
    def seconds(self) -> float:
        """How long the search took."""
        return self.prepare_s + self.select_s

    @property
    def counts(self) -> tuple[int, int]:
        """How many plans were looked at, and how many of them fit."""
        return len(self.candidates), self.num_fitting

    @property
    def best(self) -> Candidate:
        """The candidate to use.

        Raises:
            PlanError: None fits; the error says what would.
        """
        if self.num_fitting:
            return self.candidates[0]
        raise nothing_fits(self.task, self.candidates)

    @property
    def fastest(self) -> Candidate:
        """The candidate whose predicted step is shortest; `best` may be a simpler one that is hardly slower.

        Raises:
            PlanError: None fits.
        """
        if not self.num_fitting:
            return self.best
        return min(self.candidates[: self.num_fitting], key=_seconds_of)


def weigh(task: Task, plan: Plan) -> Candidate:
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


def rank(candidates: Iterable[Candidate]) -> tuple[tuple[Candidate, ...], int]:
    """Returns the candidates, best first, those that do not fit last, and how many fit. See [Note: simpler plans]."""
    found = list(candidates)
    fitting = [candidate for candidate in found if candidate.fits]
    others = sorted((candidate for candidate in found if not candidate.fits), key=_bytes_of)
    return (*_ranked(fitting), *others), len(fitting)


def _ranked(fitting: list[Candidate]) -> list[Candidate]:
    if not fitting:
        return []
    by_time = sorted(fitting, key=_seconds_of)
    limit_s = _seconds_of(by_time[0]) * (1 + INDISTINCT)
    close = sum(_seconds_of(candidate) <= limit_s for candidate in by_time)
    return sorted(by_time[:close], key=_complexity) + by_time[close:]


def _seconds_of(candidate: Candidate) -> float:
    assert candidate.step is not None
    return candidate.step.total_s


def _bytes_of(candidate: Candidate) -> float:
    return candidate.memory.reserved_bytes


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    plan = candidate.plan
    return (
        sum(size > 1 for size in (plan.shard, plan.tensor, plan.pipeline)),
        plan.offload != "none",
        plan.recompute != "none",
        plan.schedule not in ("1f1b", "gpipe"),
        len(plan.layers) > 0,
        plan.stages_per_device,
        plan.micro_batches,
        _seconds_of(candidate),
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
