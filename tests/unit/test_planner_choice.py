"""The plan that a session uses, and the log and dump files that tell of it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.models.shapes import TransformerShape, profile_of
from moreh_ap.planner.search.choice import Choice, choose_plan
from moreh_ap.planner.search.ranking import Task
from moreh_ap.planner.search.space import Constraints

SHAPE = TransformerShape(24, 2048, 8192, 16, 16, 128, 32000, name="one billion")


def choose(
    text: str = "8xH100", batch: int = 64, forced: str = "", shape: TransformerShape = SHAPE, **left: object
) -> Choice:
    task = Task(profile_of(shape, 1024), find_cluster(text), batch, Constraints(**left))  # type: ignore[arg-type]
    return choose_plan(task, Plan.parse(forced) if forced else None)


def test_the_best_of_the_search_is_chosen():
    choice = choose()
    assert choice.chosen is choice.candidates[0]
    assert choice.chosen.fits
    assert "plans fit in" in choice.reason and "a step" in choice.reason


EVERY_KIND = [
    "tensor=2,sequence_parallel=true,pipeline=2,schedule=zero_bubble",
    "pipeline=4,micro_batches=8,schedule=gpipe,recompute=full",
    "pipeline=2,schedule=interleaved,layers=5+7+7+5,replicate=2",
    "shard=2,tensor=2,recompute=3,offload=optimizer",
]


@pytest.mark.parametrize("text", EVERY_KIND)
def test_every_kind_of_plan_may_be_forced(text):
    choice = choose("4xH100", batch=8, forced=text)
    assert (str(choice.plan), len(choice.candidates)) == (str(Plan.parse(text)), 1)
    assert choice.reason.startswith("it was asked for") and "does not fit" not in choice.reason
    assert choice.lines[-1] == f"[info] {choice.plan.platform_line(8)}"


def test_a_forced_plan_that_does_not_fit_is_taken_and_said_so():
    choice = choose("4xL4", forced="replicate=4", shape=replace(SHAPE, num_layers=96))
    assert choice.plan == Plan(4)
    assert "by our estimate it does not fit" in choice.reason


def test_a_forced_plan_for_other_devices_is_refused():
    with pytest.raises(PlanError, match="needs 4 devices, the accelerator has 2"):
        choose("2xH100", forced="shard=4")


def test_unproven_kinds_only_where_nothing_fits_without():
    unproven = {"kinds": frozenset(), "distribute_parameter": False, "offload": False}
    assert choose("2xH100", **unproven).plan.pipeline == choose("2xH100", **unproven).plan.tensor == 1
    large = replace(SHAPE, num_layers=96)
    chosen = choose("2xA100-80GB", shape=large, **unproven).plan
    assert chosen.tensor * chosen.pipeline == 2
    with pytest.raises(PlanError, match="out of memory"):
        choose("2xL4", shape=large, **unproven)


def test_log_lines_are_the_platforms():
    choice = choose("2xH100", batch=8, num_micro_batches=2, kinds=frozenset(), activation_recomputation=False)
    patterns = [
        rf"The number of candidates is {len(choice.candidates)}\.",
        r"Parallel Graph Compile start\.\.\.",
        r"Elapsed Time to compile all candidates = \d+ \[ms\]",
        r"Parallel Graph Compile finished\.",
        rf"The number of possible candidates is {sum(one.fits for one in choice.candidates)}\.",
        r"SelectBestGraphFromCandidates start\.\.\.",
        r"Elapsed Time to compute cost for survived candidates = \d+ \[ms\]",
        r"SelectBestGraphFromCandidates finished\.",
        r"Configuration for parallelism is selected\.",
        r"num_stages : 1, num_micro_batches : 2, batch_per_device : 2, No TP, recomputation : 0, "
        r"distribute_param : (true|false), distribute_low_prec_param : false",
    ]
    assert len(choice.lines) == len(patterns)
    for line, pattern in zip(choice.lines, patterns, strict=True):
        assert re.fullmatch(r"\[info\] " + pattern, line)


def test_start_up_lines():
    lines = log.startup_lines(["127.0.0.1:5000", "127.0.0.1:5001"], "0.1.0", 42)
    assert all(line.startswith("[info] ") for line in lines)
    assert lines[2:4] == [
        "[info] [1/2] Connecting to resources on the server (127.0.0.1:5000)...",
        "[info] [2/2] Connecting to resources on the server (127.0.0.1:5001)...",
    ]
    assert lines[5] == "[info] MoAI Accelerator is ready to use."


def test_selected_config_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = Plan(2, 2, micro_batches=4, precision="bf16")
    path = log.write_selected_config(plan, 16)
    assert path.name == "advanced_parallelization_selected_config.dump"
    first, second = (tmp_path / path).read_text().splitlines()
    assert first == plan.platform_line(16)
    assert Plan.parse(second.removeprefix("plan : ")) == plan


def test_autoconfig_file(tmp_path):
    choice = choose()
    lines = log.write_autoconfig_log(choice, tmp_path / "autoconfig_log.dump").read_text().splitlines()
    assert lines[: len(choice.lines)] == list(choice.lines)
    assert f'plan="{choice.plan}"' in lines[len(choice.lines)]
    candidates = lines[len(choice.lines) + 1 :]
    assert len(candidates) == len(choice.candidates)
    assert [line for line in candidates if ", selected (" in line] == [candidates[0]]
    assert all("does not fit" in line for line, one in zip(candidates, choice.candidates, strict=True) if not one.fits)
