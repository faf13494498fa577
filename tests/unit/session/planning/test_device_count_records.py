"""The record of how many devices a script used."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

from moreh_ap.local.cache_files import FOLDER_VARIABLE
from moreh_ap.session.planning import device_count_records as records
from moreh_ap.session.planning.device_count_records import DeviceRecord

RECORD = DeviceRecord("Net, 7 parameters, (2, 3)", 2, 4, 0.1, 0.3)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)


def test_a_script_is_recognised_by_its_file_arguments_and_devices(monkeypatch, tmp_path):
    key = records.script_key("cpu", 4)
    assert key == records.script_key("cpu", 4) and "0.1" not in key, "arguments may be secret"
    assert len({key, records.script_key("cpu", 8), records.script_key("cuda", 4)}) == 3
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.2"])
    assert records.script_key("cpu", 4) != key
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "other.py"))
    assert "other.py" in records.script_key("cpu", 4)
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert records.script_key("cpu", 4) == "", "a notebook has none"


def test_what_is_kept_is_found_and_can_be_forgotten():
    assert records.look_up("a") is None
    records.keep("a", RECORD)
    assert records.look_up("a") == RECORD and records.look_up("b") is None
    records.keep_all("a")
    assert records.look_up("a").devices == 4 and records.look_up("a").model == RECORD.model
    records.forget("a")
    assert records.look_up("a") is None
    records.keep_all("a")
    assert records.look_up("a") is None, "only what chose fewer devices goes back to all"


def test_nothing_is_kept_for_a_session_without_a_file():
    records.keep("", RECORD)
    assert records.look_up("") is None and not records.FILE.path.exists()


@pytest.mark.parametrize(
    "change",
    [{"devices": 5}, {"devices": 0}, {"devices": True}, {"devices": "2"}, {"all_s": -1.0}, {"all_s": 1}, {"more": 1}],
)
def test_an_entry_that_was_edited_into_nonsense_counts_as_none(change):
    records.FILE.keep("a", {**asdict(RECORD), **change})
    assert records.look_up("a") is None


def test_an_entry_that_lacks_a_figure_counts_as_none():
    records.FILE.keep("a", {"devices": 2})
    assert records.look_up("a") is None


def test_a_step_that_takes_longer_than_was_predicted_for_all_speaks_against_fewer():
    assert RECORD.is_worse_than_all(0.31) and not RECORD.is_worse_than_all(0.29)
    records.keep("a", RECORD)
    records.keep_all("a")
    assert not records.look_up("a").is_worse_than_all(1.0)
    assert json.loads(records.FILE.path.read_text())["a"]["date"]
