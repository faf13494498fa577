"""When compiled blocks are kept, and what earlier runs tell of them."""

from __future__ import annotations

import pytest

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Corrections, Task
from moreh_ap.session.planning import compiled_runs
from moreh_ap.session.planning.compiled_runs import Measured
from moreh_ap.session.planning.step_watch import Expected, corrections_of, remember_run


@pytest.mark.parametrize(
    ("compiled_s", "compiling_s", "pays"),
    [
        (0.8, 28.0, True),
        (0.96, 28.0, False),  # may be chance
        (0.8, 197.0, True),
        (0.8, 203.0, False),  # not repaid within a thousand steps
        (1.3, 28.0, False),
        (1.0, 0.0, False),  # runs as written
    ],
)
def test_compiled_blocks_are_kept_if_they_pay(compiled_s, compiling_s, pays):
    assert Measured(1.0, compiled_s, compiling_s).pays is pays


@pytest.fixture(autouse=True)
def nothing_learned(tmp_path, monkeypatch):
    """No run was saved yet."""
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))


def planned(text):
    profile = profile_of(TransformerShape(4, 256, 768, 8, 8, 32, 2000), 128)
    return evaluate_plan(Task(profile, find_cluster("2xH100"), 8), Plan.parse(text))


def remember(text, first_s, seconds, batch=8, model="Model"):
    remember_run(Expected("machine", model, batch, planned(text), Corrections()), first_s, seconds, 2**31)


def test_two_runs_that_differ_in_nothing_else_tell():
    plan = Plan(replicate=2)
    remember("replicate=2", 2.0, 1.0)
    assert compiled_runs.measured("machine", "Model", 8, plan) is None
    for other in ({"batch": 4}, {"model": "Another"}):
        remember("replicate=2,compile=blocks", 30.0, 0.5, **other)
    remember("shard=2,compile=blocks", 30.0, 0.5)
    assert compiled_runs.measured("machine", "Model", 8, plan) is None
    remember("replicate=2,compile=blocks", 30.0, 0.9)
    remember("replicate=2,compile=blocks", 40.0, 0.5)
    assert compiled_runs.measured("machine", "Model", 8, plan) == Measured(1.0, 0.5, 38.0)
    assert compiled_runs.measured("elsewhere", "Model", 8, plan) is None


def test_runs_that_say_nothing_are_left_out():
    remember("replicate=2", 2.0, 1.0)
    remember("replicate=2,compile=blocks", 30.0, 0.001)  # too short for a difference to be one
    remember("replicate=2,compile=blocks", float("inf"), 0.5)
    assert compiled_runs.measured("machine", "Model", 8, Plan(replicate=2)) is None


def test_predictions_are_corrected_by_runs_as_written():
    predicted_s = planned("replicate=2").step.total_s
    remember("replicate=2,compile=blocks", 30.0, 30 * predicted_s)
    assert corrections_of("machine").time == pytest.approx(30.0, rel=1e-3)
    remember("replicate=2", 2.0, 50 * predicted_s)
    assert corrections_of("machine").time == pytest.approx(50.0, rel=1e-3)
