"""`moreh-ap report`: what the script is told, its exit status, and pages that are made again."""

from __future__ import annotations

import json
import sys

import pytest

from moreh_ap.cli.main import main
from moreh_ap.reporting.run_record import RunRecord

SCRIPT = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["MOREH_REPORT"])
folder.mkdir()
(folder / "report.json").write_text(" ".join(sys.argv[1:]))
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_script_gets_its_arguments_and_the_folder(folder):
    assert main(["report", "train.py", "--lr", "0"]) == 0
    assert (folder / "moreh_report" / "report.json").read_text() == "--lr 0"
    assert main(["report", "-o", "other", "train.py", "-o", "mine", "4"]) == 4
    assert (folder / "other" / "report.json").read_text() == "-o mine 4"


def test_a_script_without_the_line_is_explained(folder, capsys):
    (folder / "train.py").write_text(f"import sys\nassert sys.executable == {sys.executable!r}")
    assert main(["report", "train.py"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train.py has ended without the one line, so there is no report" and len(said) == 4


def test_a_page_is_made_again(folder, capsys):
    (folder / "report.json").write_text(RunRecord("train.py --lr 1", "2026-11-25 10:00:00").to_json())
    assert main(["report", "report.json"]) == 0
    assert capsys.readouterr().out == "report.html\n"
    assert "<h1>train.py --lr 1</h1>" in (folder / "report.html").read_text()


@pytest.mark.parametrize("text", ["", "{}", json.dumps({"format": 99}), json.dumps({"format": 1, "odd": 2})])
def test_another_file_is_no_record(folder, capsys, text):
    (folder / "report.json").write_text(text)
    assert main(["report", "report.json"]) == 2
    assert capsys.readouterr().err.startswith("report.json is no record of a run of this version\nAllowed: ")


def test_a_file_that_is_not_there(folder, capsys):
    assert main(["report", "none.json"]) == 2
    assert main(["report", "none.py"]) == 2
    said = capsys.readouterr().err
    assert "none.json: No such file" in said and "there is no file none.py" in said
