"""What is learned from runs on a machine, and what of a file of them is believed."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import TransformerShape, profile_of
from moreh_ap.planner.search.candidate import evaluate_plan
from moreh_ap.planner.search.planning_task import Corrections, Task
from moreh_ap.protocol.messages.devices import StepReport
from moreh_ap.session.planning import device_count_records, step_watch
from moreh_ap.session.planning.device_count_records import DeviceRecord

GIB = 2**30
MACHINE = "here, 2 x CPU"
GOOD = {"measured_s": 3.0, "predicted_s": 2.0, "measured_bytes": 6 * GIB, "predicted_bytes": 4 * GIB}


@pytest.fixture
def learned(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path / "learned.json"


def write(learned, runs) -> None:
    learned.write_text(json.dumps({MACHINE: {"runs": runs}}))


def test_the_median_of_what_runs_were_off_corrects_the_next(learned):
    write(learned, [GOOD, {**GOOD, "measured_s": 1.0}, {**GOOD, "measured_s": 8.0, "measured_bytes": 2 * GIB}])
    assert step_watch.corrections_of(MACHINE) == Corrections(time=1.5, memory=1.5)
    assert step_watch.corrections_of("elsewhere") == Corrections()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"measured_s": 9.0, "measured_bytes": 9 * GIB},
        {**GOOD, "predicted_s": 0, "predicted_bytes": 0},
        {**GOOD, "predicted_s": -1.0, "predicted_bytes": -1},
        {**GOOD, "measured_s": "fast", "measured_bytes": None},
        {**GOOD, "measured_s": True, "predicted_bytes": [1]},
        {**GOOD, "measured_s": float("nan"), "predicted_bytes": float("nan")},
        {**GOOD, "measured_s": float("inf"), "measured_bytes": 10**400},
        {**GOOD, "measured_s": 0.001, "measured_bytes": 5},
        "a run",
        None,
    ],
)
def test_a_broken_run_is_ignored_and_the_others_count(learned, broken):
    write(learned, [broken])
    found = step_watch.corrections_of(MACHINE)
    assert found.time in (1.0, 1.5) and found.memory in (1.0, 1.5), "at most the half that is well formed counts"
    write(learned, [broken, GOOD, GOOD, GOOD])
    assert step_watch.corrections_of(MACHINE) == Corrections(time=1.5, memory=1.5)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"here, 2 x CPU": 1}', '{"here, 2 x CPU": {"runs": {"a": 1}}}'])
def test_a_broken_file_counts_as_empty_and_is_written_anew(learned, text):
    learned.write_text(text)
    assert step_watch.corrections_of(MACHINE) == Corrections()
    step_watch.remember_run(_expected(), 2.0, 0.5, 3 * GIB)
    (run,) = json.loads(learned.read_text())[MACHINE]["runs"]
    assert run["measured_s"] == 0.5 and run["measured_bytes"] == 3 * GIB


def test_a_run_is_remembered_without_the_corrections_that_its_prediction_contained(learned):
    expected = _expected(Corrections(time=2.0, memory=4.0))
    step_watch.remember_run(expected, 2.0, 1.0, 2 * GIB)
    (run,) = json.loads(learned.read_text())[MACHINE]["runs"]
    assert run["predicted_s"] == pytest.approx(expected.chosen.step.total_s / 2, rel=1e-3)
    assert run["predicted_bytes"] == pytest.approx(expected.chosen.memory.reserved_bytes / 4)


def test_no_more_than_fifty_runs_are_kept(learned):
    write(learned, [{**GOOD, "number": number} for number in range(60)])
    step_watch.remember_run(_expected(), 2.0, 1.0, 2 * GIB)
    runs = json.loads(learned.read_text())[MACHINE]["runs"]
    assert len(runs) == 50 and runs[0]["number"] == 11 and runs[-1]["plan"] == "replicate=2"


def test_where_nothing_can_be_written_the_training_goes_on(learned, monkeypatch):
    blocked = learned.parent / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv(FOLDER_VARIABLE, str(blocked))
    step_watch.remember_run(_expected(), 2.0, 1.0, 2 * GIB)
    assert step_watch.corrections_of(MACHINE) != Corrections(), "this process knows it"
    assert blocked.read_text() == "in the way"


def _expected(corrections: Corrections | None = None) -> step_watch.Expected:
    corrections = corrections or Corrections()
    profile = profile_of(TransformerShape(4, 256, 768, 8, 8, 32, 2000), 128)
    task = Task(profile, find_cluster("2xH100"), 8, corrections=corrections)
    return step_watch.Expected(MACHINE, "small", 8, evaluate_plan(task, Plan(2)), corrections)


class Workers:
    """Answer how long steps took at once."""

    def __init__(self, seconds: list[float]) -> None:
        self._reports = [StepReport(tuple(seconds), GIB)]

    def post_soon(self, command):
        return SimpleNamespace(failed=lambda: False, done=lambda: True, result=lambda: self._reports)


@pytest.mark.parametrize(
    ("on_workers", "in_script", "expected"),
    [
        ([9.0, *[2.0] * 5], 3.0, 3.0),  # the script does something between its steps
        ([9.0, *[2.0] * 5], 0.5, 2.0),  # it reads no loss, and sends ahead
        ([], 3.0, 3.0),  # several calls for a step
    ],
)
def test_seconds_from_step_to_step_are_told_once(learned, monkeypatch, on_workers, in_script, expected):
    clock, told = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(step_watch.time, "perf_counter", lambda: clock.now)
    watch = step_watch.Watch(Workers(on_workers), _expected(), lambda *result: told.append(result))
    first, other = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(2))
    for _ in range(7):
        assert told == []
        clock.now += in_script
        watch.stepped(first)
        watch.stepped(other)
        watch.stepped_here(first)
    assert told == [(first, expected)]


def test_a_watch_that_waits_ends_with_the_last_of_its_steps(learned):
    asked, told = [], []

    class Slow:
        """Answer only while a caller waits for them."""

        def post_soon(self, command):
            return SimpleNamespace(
                add_done_callback=lambda call: (asked.append(command), threading.Timer(0.05, call, [None]).start()),
                failed=lambda: False,
                done=lambda: True,
                result=lambda: [StepReport((9.0, *[2.0] * 5), GIB)],
            )

    watch = step_watch.Watch(Slow(), _expected(), lambda *result: told.append(result), waits=True)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for number in range(step_watch.LOOKS_AFTER_STEPS):
        assert asked == told == [], number
        watch.stepped(optimizer)
    assert len(asked) == 1 and told == [(optimizer, 2.0)]


def test_where_nothing_was_learned_of_a_number_of_devices_that_of_another_counts(learned):
    other = Corrections(time=3.0, memory=2.0)
    assert step_watch.corrections_of(MACHINE, other) == other
    write(learned, [{**GOOD, "measured_bytes": 1}])
    assert step_watch.corrections_of(MACHINE, other) == Corrections(time=1.5, memory=2.0)


@pytest.mark.parametrize(("all_s", "is_kept"), [(1.9, False), (2.1, True)])
def test_fewer_devices_that_are_slower_than_all_were_predicted_are_forgotten(learned, capsys, all_s, is_kept):
    device_count_records.keep("script", DeviceRecord("small", 2, 4, 1.0, all_s))
    watch = step_watch.Watch(
        Workers([9.0, *[2.0] * 5]), replace(_expected(), script="script"), lambda optimizer, step_s: None
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    for _ in range(7):
        watch.stepped(optimizer)
    assert (device_count_records.look_up("script") is not None) is is_kept
    assert ("chooses the number of devices anew" in capsys.readouterr().out) is not is_kept


def test_a_model_s_own_runs_correct_it_and_those_of_others_hardly(learned):
    off = {**GOOD, "model": "ResNet, 1 parameters", "measured_s": 0.2, "predicted_bytes": 60 * GIB}
    own = {**GOOD, "model": "Llama, 2 parameters"}
    write(learned, [off, off, off])
    others = step_watch.corrections_of(MACHINE, model="Llama, 2 parameters")
    assert others == Corrections(time=0.5, memory=0.8), "a tenth of another model's prediction says little"
    assert step_watch.corrections_of(MACHINE, model="ResNet, 1 parameters") == Corrections(time=0.1, memory=0.1)
    write(learned, [off, own, off])
    assert step_watch.corrections_of(MACHINE, model="Llama, 2 parameters") == Corrections(time=1.5, memory=1.5)
    assert step_watch.corrections_of(MACHINE, Corrections(3.0, 2.0), "GPT, 3 parameters").memory == 0.8
