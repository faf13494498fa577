"""When the number of devices changes, and what is remembered of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.plan import Plan
from moreh_ap.planner.search.plan_search import search
from moreh_ap.session.planning import device_count, device_count_records
from moreh_ap.settings import Options
from moreh_ap.states import SessionState
from unit.planner.search.test_device_counts import on, task

WHOLE = task("8xT4", batch=2)
ALL_S = search(WHOLE).best.seconds
NET = "Net, 7 parameters, (2, 3)"


class Outbox:
    """Takes commands without workers."""

    def __init__(self, state=SessionState.EMPTY):
        self.state, self.restarted = SimpleNamespace(current=state), []

    def flush(self):
        pass

    def restart(self, restart):
        self.restarted.append(restart.workers)


class Session:
    """Eight devices, all of which have a worker unless said otherwise."""

    device_type, max_devices = "cuda", 8

    def __init__(self, num_devices=8, state=SessionState.EMPTY, **options):
        self.num_devices, self.options, self.outbox = num_devices, Options(**options), Outbox(state)

    @property
    def uses_fewer_devices(self):
        return self.num_devices < self.max_devices

    def restart_workers(self, num_devices):
        self.num_devices = num_devices
        return num_devices


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)


def use_fewer(session, root=None, all_s=ALL_S):
    """Returns the number of devices that are used afterwards."""
    restarts = device_count.use_fewer(session, root or nn.Linear(2, 3), NET, all_s, 2, lambda count: on(WHOLE, count))
    assert restarts is bool(session.outbox.restarted)
    return session.num_devices


def at_start(**options):
    return device_count_records.devices_at_start(Options(**options), "cuda", 8)


def test_fewer_devices_are_used_and_the_next_run_starts_with_them(capsys):
    count = use_fewer(Session())
    assert count < 8 == at_start(devices=8)
    assert f"{count} of 8 devices are used: a step is predicted to take" in capsys.readouterr().out
    assert at_start() == count
    assert at_start(plan=Plan.parse("replicate=8")) == 8, "a plan is for a number of devices"
    again = Session(count)
    device_count.settle_start(again, NET)
    assert again.num_devices == count and not again.outbox.restarted
    assert f"{count} of 8 devices are used, as in an earlier run" in capsys.readouterr().out


def test_with_all_devices_faster_nothing_happens(capsys):
    assert use_fewer(Session(), all_s=1e-6) == 8
    assert at_start() == 8 and capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [{"devices": 8}, {"plan": Plan.parse("replicate=8")}])
def test_a_number_that_was_asked_for_is_kept(options):
    assert use_fewer(Session(**options)) == 8


@pytest.mark.parametrize("state", [SessionState.REPLAYABLE, SessionState.UNREPLAYABLE])
def test_only_the_first_model_can_take_fewer(state):
    assert use_fewer(Session(state=state)) == 8


def test_a_model_that_is_evaluated_does_not_decide():
    with torch.no_grad():
        assert use_fewer(Session()) == 8
    assert use_fewer(Session(), nn.Linear(2, 3).requires_grad_(False)) == 8


def test_another_model_than_the_remembered_one_has_all_devices_first(capsys):
    count = use_fewer(Session())
    other = Session(count)
    device_count.settle_start(other, "Another, 9 parameters, (2, 3)")
    assert other.num_devices == 8 and other.outbox.restarted == [8]
    assert f"8 devices instead of {count} are used" in capsys.readouterr().out


def test_a_script_that_went_back_to_all_devices_stays_there():
    use_fewer(Session())
    device_count.use_all_next_time(Session())
    assert at_start() == 8
    assert use_fewer(Session()) == 8


def test_one_worker_on_the_cpu_is_not_chosen_by_prediction():
    """Whether one process is faster is tried in the script's own."""
    session = Session()
    session.device_type = "cpu"
    assert 2 <= use_fewer(session) < 8
    record = replace(device_count_records.look_up(device_count_records.script_key("cpu", 8)), devices=1)
    device_count_records.keep(device_count_records.script_key("cpu", 8), record)
    assert device_count_records.devices_at_start(Options(), "cpu", 8) == 8


def test_a_second_model_gets_all_devices_if_it_is_clearly_faster_there():
    on_all = search(task("8xH100", batch=64))
    best_s = on_all.best.seconds
    assert device_count.is_faster_on_all(best_s * 1.3, on_all) and device_count.is_faster_on_all(float("inf"), on_all)
    assert not device_count.is_faster_on_all(best_s * 1.1, on_all)
    assert not device_count.is_faster_on_all(float("inf"), replace(on_all, num_fitting=0))
