"""Which models are timed in the script's own process, and where they stay."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.plan import Plan
from moreh_ap.session.own_process import faster_place
from moreh_ap.session.own_process.faster_place import FILE, FasterPlace, StepTimes
from moreh_ap.settings import Options, resolve_options


@pytest.fixture(autouse=True)
def memory(monkeypatch, tmp_path):
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(faster_place.time, "perf_counter", lambda: clock.now)
    return clock


def places(options=None, device_type="cpu"):
    return FasterPlace(SimpleNamespace(options=options or Options(), num_devices=2, device_type=device_type))


def call(rows=8):
    return (torch.zeros(rows, 4),), {}


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def measure(known, step_s, *models, rows=8):
    """Has models been laid out and timed on the workers; returns the optimizer whose steps were timed."""
    for model in models:
        known.note_layout(model, call(rows))
    optimizer = optimizer_of(models[0])
    known.measured_on_workers(models, optimizer, step_s)
    return optimizer


def run(trial, optimizer, seconds, clock):
    """Steps once, and once more after each of these times; returns the results that the trial has given."""
    results = []
    trial.ended = results.append
    for step in [0.0, *seconds]:
        clock.now += step
        trial.stepped_here(optimizer)
    return results


@pytest.mark.parametrize(("here_s", "is_faster_here"), [(0.5, True), (0.99, True), (1.01, False), (2.0, False)])
def test_the_faster_place_is_remembered_for_the_same_call(clock, capsys, here_s, is_faster_here):
    model, known = nn.Linear(4, 2), places()
    optimizer = measure(known, 1.0, model)
    assert known.is_due(model) and not known.is_due(nn.Linear(4, 2))
    (times,) = run(known.take_due(), optimizer, [9.0, here_s, 5 * here_s, here_s], clock)
    assert times == StepTimes("Linear", pytest.approx(here_s), 1.0, 2) and times.is_faster_here is is_faster_here
    where, ratio = ("in this process", 1 / here_s) if is_faster_here else ("on the workers", here_s)
    shown = capsys.readouterr().out
    assert f"[info] Linear runs {where}: a step takes " in shown and f"(x{ratio:.2f})" in shown
    again = places().known_times(model, call())
    assert again is not None and again.is_faster_here is is_faster_here
    assert places().known_times(model, call(16)) is None
    assert places().known_times(nn.Linear(4, 3), call()) is None
    measure(known, 1.0, model)
    assert not known.is_due(model)


def test_models_that_train_together_are_due_together_and_each_remembers_the_result(clock, capsys):
    known, generator, critic, other = places(), nn.Linear(4, 2), nn.Bilinear(4, 4, 2), nn.Linear(4, 4)
    optimizer = measure(known, 1.0, generator, critic)
    assert [known.is_due(one) for one in (generator, critic, other)] == [True, True, False]
    (times,) = run(known.take_due(), optimizer, [0.5] * 4, clock)
    assert not known.is_due(generator) and times.models == "Bilinear, Linear"
    assert capsys.readouterr().out.count("Bilinear, Linear run in this process: a step takes 0.5 s") == 1
    for one in (generator, critic):
        again = places().known_times(one, call())
        assert again is not None and again.line() == times.line()
    measure(known, 1.0, critic, other)  # beside a model of which nothing is known
    assert known.is_due(critic)


def test_only_steps_of_the_optimizer_that_was_timed_on_the_workers_count(clock):
    known, model = places(), nn.Linear(4, 2)
    optimizer, other = measure(known, 1.0, model), optimizer_of(nn.Linear(1, 1))
    results, trial = [], known.take_due()
    trial.ended = results.append
    trial.stepped_here(other)
    for _ in range(5):
        assert not results
        clock.now += 0.25
        trial.stepped_here(optimizer)
        trial.stepped_here(other)
        trial.stepped(other)
    assert [one.here for one in results] == [0.25]
    trial.stepped_here(optimizer)
    assert len(results) == 1


def test_models_that_can_never_leave_the_workers_stay(monkeypatch):
    monkeypatch.setattr(faster_place, "_MAX_ASKED", 3)
    known, model = places(), nn.Linear(4, 2)
    measure(known, 1.0, model)
    for _ in range(3):
        assert known.is_due(model)
        known.put_off()
    assert not known.is_due(model)
    known.put_off()


@pytest.mark.parametrize(
    "options",
    [
        Options(plan=Plan.parse("replicate=2")),
        Options(autotune=True),
        Options(strict=True),
        Options(check_steps=3),
        resolve_options({}, devices=2),
    ],
)
def test_a_script_that_says_where_it_runs_is_not_tried_elsewhere(options):
    model, known = nn.Linear(4, 2), places(options)
    measure(known, 1.0, model)
    assert not known.is_due(model)


def test_neither_are_gpus_and_large_models(monkeypatch):
    model = nn.Linear(4, 2)
    for known in (places(device_type="cuda"), places(resolve_options({"MOREH_NUM_DEVICES": "2"}))):
        measure(known, 1.0, model)
        assert known.is_due(model) is (known._session.device_type == "cpu")
    monkeypatch.setattr(faster_place, "MAX_BYTES", 79)
    for together in ([model], [model, nn.Linear(4, 2)]):
        known = places()
        measure(known, 1.0, *together)
        assert known.is_due(model) is (len(together) == 1)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"here_s": 1.0},
        {"here_s": "1", "on_workers_s": 2.0},
        {"here_s": -1.0, "on_workers_s": 2.0},
        {"here_s": 1.0, "on_workers_s": 2.0, "models": 3},
        [],
    ],
)
def test_an_entry_that_was_edited_does_not_count(entry):
    model, known = nn.Linear(4, 2), places()
    FILE.path.write_text(json.dumps({known._key(model, call()): entry}))
    assert known.known_times(model, call()) is None


def test_a_folder_that_cannot_be_written_loses_the_result_with_the_process(clock, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path / "file"))
    model, known = nn.Linear(4, 2), places()
    optimizer = measure(known, 1.0, model)
    assert len(run(known.take_due(), optimizer, [1.0] * 4, clock)) == 1
    assert known.known_times(model, call()) is not None
    assert (tmp_path / "file").read_text() == ""


def test_equal_options_are_equal_whoever_gives_the_number_of_devices():
    options = Options(devices=2)
    assert options == replace(options, asks_for_devices=True)
