"""The plan that a session uses, why, and what the log says of the choice.

Decides between the user's plan and the search's best. Must not know how plans are searched for, devices or torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.search import explain
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.ranking import Candidate, Ranking, Task
from moreh_ap.planner.search.space import ALL_KINDS


@dataclass(frozen=True)
class Choice:
    """The chosen plan with everything that led to it.

    Attributes:
        chosen: The chosen plan with its estimates.
        reason: One sentence with the numbers that decided.
        candidates: All plans looked at, best first.
        lines: The log lines of the search, in the platform's order.
    """

    chosen: Candidate
    reason: str
    candidates: tuple[Candidate, ...]
    lines: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The chosen plan."""
        return self.chosen.plan


def choose_plan(task: Task, forced: Plan | None = None) -> Choice:
    """Returns the fastest plan that fits, or the plan that the user forces, with its estimates.

    Kinds of plans that nobody has proven for the model's family are looked at only where nothing fits without them:
    whoever uses one has to prove it first.

    Raises:
        PlanError: A forced plan is for another number of devices, or no plan fits; the error says what would.
    """
    started_s = time.perf_counter()
    if forced is not None:
        chosen = _forced(task, forced)
        candidates: tuple[Candidate, ...] = (chosen,)
        num_fitting = int(chosen.fits)
        prepare_s, select_s = time.perf_counter() - started_s, 0.0
        reason = f"it was asked for: {explain.prediction(chosen)}"
        if not chosen.fits:
            reason += f"; by our estimate it does not fit in {chosen.usable_bytes / 2**30:.2f} GiB"
    else:
        ranking = _search(task)
        chosen, candidates, num_fitting = ranking.best, ranking.candidates, ranking.num_fitting
        prepare_s, select_s = ranking.prepare_s, ranking.select_s
        reason = explain.reason(ranking)
    lines = log.search_lines(
        num_candidates=len(candidates),
        num_possible=max(num_fitting, 1),
        prepare_s=prepare_s,
        select_s=select_s,
        plan=chosen.plan,
        global_batch=task.global_batch,
    )
    return Choice(chosen, reason, candidates, tuple(lines))


def _forced(task: Task, plan: Plan) -> Candidate:
    if plan.num_devices != task.cluster.num_devices:
        raise PlanError(
            f"plan={str(plan)!r} needs {plan.num_devices} devices, the accelerator has {task.cluster.num_devices}",
            f"replicate x shard x tensor x pipeline = {task.cluster.num_devices}",
            f'torch.moreh.option.enable_advanced_parallelization(plan="replicate={task.cluster.num_devices}")',
        )
    return Candidate(plan, task.memory_of(plan), task.usable_bytes, task.step_of(plan))


def _search(task: Task) -> Ranking:
    ranking = search(task)
    if ranking.num_fitting or task.constraints.kinds == ALL_KINDS:
        return ranking
    wider = search(replace(task, constraints=replace(task.constraints, kinds=ALL_KINDS)))
    return wider if wider.num_fitting else ranking
