"""What a script does before its first call: noted, left out, or the end of the dry run."""

from __future__ import annotations

import getpass
import importlib
import os

import pytest
import torch

from moreh_ap.dry.side_effects import Asked, SideEffects


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.chdir(tmp_path)


def test_files_that_were_changed_are_named_and_those_that_were_read_are_not(tmp_path):
    (tmp_path / "read.txt").write_text("x")
    effects = SideEffects()
    with effects.noting():
        (tmp_path / "read.txt").read_text()
        os.makedirs("out")
        with open("out/args.json", "w") as file:
            file.write("{}")
        os.rename("out/args.json", "out/other.json")
    open("later.txt", "w").close()
    assert list(effects.written) == ["out", "out/args.json"]
    assert list(effects.sentences()) == ["Before its first call the script changed files: out, out/args.json."]


def test_saves_are_left_out(tmp_path):
    effects = SideEffects()
    with effects.noting():
        torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
        torch.save({"a": torch.ones(1)}, tmp_path / "b.pt")
    assert not list(tmp_path.iterdir())
    assert list(effects.sentences()) == ["Left out: torch.save, 2 times."]
    torch.save({}, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").is_file(), "undone"


def test_a_question_ends_the_run_and_no_except_of_the_script_holds_it_back():
    for ask in (lambda: input("go on? "), lambda: getpass.getpass()):
        with pytest.raises(Asked), SideEffects().noting():
            try:
                ask()
            except Exception:
                pytest.fail("held back")


def test_trackers_and_our_own_records_are_off(monkeypatch):
    os.environ["MOREH_TRACE"] = "trace.json"
    with SideEffects().noting():
        assert os.environ["WANDB_MODE"] == "disabled" and "MOREH_TRACE" not in os.environ


def test_tensorboard_writes_no_file(tmp_path, monkeypatch):
    package = tmp_path / "tensorboardX"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "event_file_writer.py").write_text(
        "class EventFileWriter:\n    def __init__(self, logdir):\n        1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    effects = SideEffects()
    with effects.noting():
        writer = importlib.import_module("tensorboardX.event_file_writer").EventFileWriter("runs")
        writer.add_event("loss")
        writer.close()
        assert writer.get_logdir() == "runs"
    assert "Left out: TensorBoard." in effects.sentences()
