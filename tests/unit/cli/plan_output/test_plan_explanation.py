"""The sentences that say why a plan was chosen."""

from __future__ import annotations

from moreh_ap.cli.plan_output import plan_explanation
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.known_models import find_model
from moreh_ap.planner.profiles.transformer_shape import profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Task
from unit.planner.search.samples import PROFILE, find


def test_sentences_name_the_figures_that_decided():
    profile = profile_of(find_model("Llama3-70B").shape, 1024)
    ranking = find("64xMI250", 512, profile)
    said = plan_explanation.sentences(ranking)
    assert said[0].startswith(f"{ranking.num_fitting} of {len(ranking.candidates)} plans fit in 51.2 GiB a device")
    plan = ranking.best.plan
    for name, used in (("a tensor axis", plan.tensor > 1), ("a pipeline", plan.pipeline > 1)):
        assert any(one.startswith(f"{'Without' if used else 'With'} {name}") for one in said)
    skipped = [int(one.split()[0]) for one in plan_explanation.skipped_sentences(ranking)]
    assert sum(skipped) == sum(ranking.skipped.values())


def test_a_mean_without_which_nothing_fits_is_said_to_be_needed():
    profile = profile_of(find_model("Llama3-8B").shape, 512)
    ranking = find("8xH100", 8, profile, kinds=frozenset())
    said = plan_explanation.sentences(ranking)
    assert any(one.startswith("Without sharded parameters nothing fits: ") for one in said)


def test_differences_name_the_largest_first():
    task = Task(PROFILE, find_cluster("8xH100"), 64)
    plans = [Plan(replicate=8, recompute=kind, precision="bf16") for kind in ("none", "full")]
    first, second = (evaluate_plan(task, plan) for plan in plans)
    assert next(plan_explanation.differences(first, second)).startswith("recomputation +")
    assert list(plan_explanation.differences(first, first)) == []
