"""The plan that a session uses: the best of a search, or the one that the user forces.

Decides whether a forced plan is possible, and when kinds of plans are looked at that were not verified. Must not know
how plans are found, or how the choice is said in the log.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.search.candidate import Candidate
from moreh_ap.planner.search.constraints import ALL_KINDS
from moreh_ap.planner.search.no_fit_error import nothing_fits
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import Ranking

__all__ = ["Choice", "choose_plan"]


@dataclass(frozen=True)
class Choice:
    """The chosen plan with everything that led to it.

    Attributes:
        ranking: All plans looked at, the chosen one first; a forced plan alone, whether it fits or not.
        is_forced: Whether the user gave the plan.
    """

    ranking: Ranking
    is_forced: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All plans looked at, best first."""
        return self.ranking.candidates

    @property
    def chosen(self) -> Candidate:
        """The chosen plan with its estimates."""
        return self.ranking.candidates[0]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.chosen.plan


def choose_plan(task: Task, forced: Plan | None = None) -> Choice:
    """Returns the fastest plan that fits, or the plan that the user forces, with its estimates.

    Kinds of parallelism that were not verified for the model's family are looked at only where nothing fits without
    them: a plan with one has to be verified before it is used.

    Raises:
        PlanError: A forced plan is for another number of devices, or no plan fits; the error says what would.
    """
    if forced is None:
        return Choice(_search(task), is_forced=False)
    started_s = time.perf_counter()
    candidate = _forced(task, forced)
    prepare_s = time.perf_counter() - started_s
    return Choice(Ranking(task, (candidate,), int(candidate.fits), {}, prepare_s, 0.0), is_forced=True)


def _forced(task: Task, plan: Plan) -> Candidate:
    if plan.num_devices != task.cluster.num_devices:
        raise PlanError(
            f"plan={str(plan)!r} needs {plan.num_devices} devices, the accelerator has {task.cluster.num_devices}",
            f"replicate x shard x tensor x pipeline = {task.cluster.num_devices}",
            f'torch.moreh.option.enable_advanced_parallelization(plan="replicate={task.cluster.num_devices}")',
        )
    return Candidate(plan, task.memory_of(plan), task.usable_bytes, task.step_of(plan), task.usable_host_bytes)


def _search(task: Task) -> Ranking:
    """Returns the plans for a task, of which at least one fits.

    Raises:
        PlanError: No plan fits.
    """
    ranking = search(task)
    if not ranking.num_fitting and task.constraints.kinds != ALL_KINDS:
        wider = search(replace(task, constraints=replace(task.constraints, kinds=ALL_KINDS)))
        ranking = wider if wider.num_fitting else ranking
    if not ranking.num_fitting:
        raise nothing_fits(task, ranking.candidates)
    return ranking
