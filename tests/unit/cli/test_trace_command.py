"""`moreh-ap trace`: what the script is told, its exit status, and requests that are refused."""

from __future__ import annotations

import sys

import pytest

from moreh_ap.cli.main import main

SCRIPT = """
import os, pathlib, sys
pathlib.Path(os.environ["MOREH_TRACE"]).write_text(os.environ["MOREH_TRACE_STEPS"] + " " + " ".join(sys.argv[1:]))
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_script_gets_its_arguments_and_the_steps(folder):
    assert main(["trace", "train.py", "--lr", "0"]) == 0
    assert (folder / "trace.json").read_text() == "13-15 --lr 0"
    assert main(["trace", "--first", "5", "--steps", "2", "-o", "other.json", "train.py", "-o", "mine", "4"]) == 4
    assert (folder / "other.json").read_text() == "5-6 -o mine 4"


def test_a_signal_is_a_status_of_a_shell(folder):
    (folder / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    assert main(["trace", "train.py"]) == 128 + 15


def test_a_script_without_the_line_is_explained(folder, capsys):
    (folder / "trace.json").write_text("of yesterday")
    (folder / "train.py").write_text(f"import sys\nassert sys.executable == {sys.executable!r}")
    assert main(["trace", "train.py"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train.py has ended without the one line, so there is no trace" and len(said) == 4


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--first", "0"]])
def test_impossible_steps_are_refused(folder, capsys, wrong):
    assert main(["trace", *wrong, "train.py"]) == 2
    assert "Allowed: at least 1" in capsys.readouterr().err


def test_a_missing_script_is_refused(folder, capsys):
    assert main(["trace", "missing.py"]) == 2
    assert "there is no file missing.py" in capsys.readouterr().err
