"""The order of candidates: what fits first, then time, and of what is as fast the simplest."""

from __future__ import annotations

import re
from dataclasses import fields, replace

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Task
from moreh_ap.planner.search.ranking import TIE_MARGIN, rank
from unit.planner.search.samples import PROFILE, find, with_memory


def test_candidates_are_ranked():
    ranking = find(with_memory(find_cluster("8xH100"), 6.0), 64)
    fitting = ranking.candidates[: ranking.num_fitting]
    assert 0 < len(fitting) < len(ranking.candidates)
    assert all(candidate.fits and not candidate.rejected and candidate.step for candidate in fitting)
    times = [candidate.step.total_s for candidate in fitting]
    limit_s = min(times) * (1 + TIE_MARGIN)
    close = sum(seconds <= limit_s for seconds in times)
    assert max(times[:close]) <= limit_s < min(times[close:], default=float("inf"))
    assert times[close:] == sorted(times[close:])
    for candidate in ranking.candidates[ranking.num_fitting :]:
        assert not candidate.fits and re.search(r"needs [\d.]+ GiB on a device, 4\.80 GiB", candidate.rejected)
    plans = [candidate.plan for candidate in ranking.candidates]
    assert len(set(plans)) == len(plans)


def test_simplest_of_what_is_as_fast():
    ranking = find("8xH100", 64)
    best, fastest = ranking.best, ranking.fastest
    assert best.step.total_s <= fastest.step.total_s * (1 + TIE_MARGIN)

    def num_axes(candidate):
        return sum(size > 1 for size in (candidate.plan.shard, candidate.plan.tensor, candidate.plan.pipeline))

    close = [one for one in ranking.candidates[: ranking.num_fitting]
             if one.step.total_s <= fastest.step.total_s * (1 + TIE_MARGIN)]  # fmt: skip
    assert num_axes(best) == min(map(num_axes, close))


def test_order_of_what_is_as_fast():
    """First fewer axes, then no recomputation, a plain order, even stages, fewer micro-batches, and time last."""
    task = Task(PROFILE, find_cluster("8xH100"), 64)
    preferred = [
        "replicate=8",
        "replicate=8,micro_batches=2",
        "replicate=8,recompute=selective",
        "replicate=4,shard=2",
        "replicate=4,pipeline=2,micro_batches=8",
        "replicate=4,pipeline=2,micro_batches=8,layers=5+3",
        "replicate=4,pipeline=2,micro_batches=8,schedule=zero_bubble",
        "replicate=4,pipeline=2,micro_batches=8,recompute=full",
        "shard=4,tensor=2",
    ]
    candidates = [evaluate_plan(task, Plan.parse(text + ",precision=bf16")) for text in preferred]
    zero = dict.fromkeys([one.name for one in fields(candidates[0].step) if one.name.endswith("_s")], 0.0)
    even = [replace(one, step=replace(one.step, **{**zero, "forward_s": 1.0 + TIE_MARGIN / 2 - place / 1e4}))
            for place, one in enumerate(candidates)]  # fmt: skip
    late = replace(even[0], step=replace(even[0].step, forward_s=1.0 + 2 * TIE_MARGIN))
    ranked, num_fitting = rank([late, *reversed(even)])
    assert num_fitting == len(even) + 1
    assert [str(one.plan) for one in ranked[:-1]] == [str(one.plan) for one in even]
    assert ranked[-1] is late
