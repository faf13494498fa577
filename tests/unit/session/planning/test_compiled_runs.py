"""When compiled blocks are kept, and what earlier runs tell of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Corrections, Task
from moreh_ap.protocol.messages.devices import ReportSteps, StepReport
from moreh_ap.protocol.messages.models import UseCompiledBlocks
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


class Workers:
    """A session whose workers answer at once, and what the script does with it."""

    def __init__(self, written_s: float, compiled_s: float) -> None:
        self.outbox, self.watch = self, None
        self.asked: list[tuple[int, bool]] = []
        """After which step compiled blocks were turned on or off."""
        self._written_s, self._compiled_s, self._steps = written_s, compiled_s, 0

    def post_soon(self, command: object) -> SimpleNamespace:
        if isinstance(command, UseCompiledBlocks):
            self.asked.append((self._steps, command.is_on))
            return SimpleNamespace()
        assert command == ReportSteps()
        is_on = bool(self.asked) and self.asked[-1][1]
        seconds = (3.0, *[self._compiled_s if is_on else self._written_s] * 5)
        return SimpleNamespace(
            add_done_callback=lambda call: call(None),
            failed=lambda: False,
            done=lambda: True,
            result=lambda: [StepReport(seconds, 2**31)],
        )

    def stop_watching(self) -> None:
        self.watch = None

    def train(self, steps: int) -> None:
        """Makes the steps of a run."""
        expected = Expected("machine", "Model", 8, planned("replicate=2"), Corrections())
        self.watch = compiled_runs.watch_to_try(self, "model", expected, lambda *_: self.stop_watching())
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        for self._steps in range(1, steps + 1):
            if self.watch is not None:
                self.watch.stepped(optimizer)


@pytest.mark.parametrize(
    ("written_s", "compiled_s", "asked"),
    [
        (0.5, 0.3, [(6, True)]),
        (0.1, 0.05, [(10, True)]),  # a second of steps as written first
        (0.1, 0.099, [(10, True), (16, False)]),
        (0.02, 0.01, []),  # too short to make up for the compiler
    ],
)
def test_blocks_are_compiled_soon_and_kept_if_that_pays(written_s, compiled_s, asked, capsys):
    workers = Workers(written_s, compiled_s)
    workers.train(30)
    assert workers.asked == asked and workers.watch is None
    said = capsys.readouterr().out
    kept = "blocks run as written" if len(asked) == 2 else "compile=blocks is kept"
    assert (f"a step takes {compiled_s:.3g} s, {written_s:.3g} s as written" in said and kept in said) is bool(asked)


def test_a_script_of_few_steps_meets_the_compiler_once():
    for steps, begun_after in ((5, None), (8, 6), (11, None), (11, None), (14, 12), (23, None), (40, 24)):
        workers = Workers(0.5, 0.3)
        workers.train(steps)
        assert workers.asked == ([] if begun_after is None else [(begun_after, True)]), steps


def test_a_trial_whose_steps_were_not_timed_says_so(capsys):
    workers = Workers(0.5, 0.001)  # too short for a difference to be one
    workers.train(20)
    assert workers.asked == [(6, True), (12, False)]
    assert (
        "blocks run as written, since a step of one forward and one backward was not timed" in capsys.readouterr().out
    )
