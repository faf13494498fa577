"""Files in which a machine remembers: where they are, and that a broken one counts as empty."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moreh_ap.local.cache_files import FOLDER_VARIABLE, CacheFile, cache_folder, write_whole


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "deep" / "cache"))
    return CacheFile("found.json")


def test_the_folder_is_that_of_the_variable_or_below_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv(FOLDER_VARIABLE, " ")
    assert cache_folder() == Path.home() / ".cache" / "moreh_ap"


def test_entries_are_kept_beside_each_other(file):
    assert file.look_up("one") is None
    file.keep("one", {"value": 1})
    file.keep("two", {"value": "둘"})
    file.keep("one", {"value": 3})
    assert (file.look_up("one"), file.look_up("two")) == ({"value": 3}, {"value": "둘"})
    assert "둘" in file.path.read_text(encoding="utf-8"), "people can read it"


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00", '{"one": 3}'])
def test_a_broken_file_counts_as_empty_and_is_written_anew(file, text):
    file.path.parent.mkdir(parents=True)
    file.path.write_text(text)
    assert file.look_up("one") is None
    file.keep("one", {"value": 1})
    assert file.look_up("one") == {"value": 1}


def test_processes_that_keep_at_the_same_time_lose_none_of_their_entries(file):
    keeps = "import sys; from moreh_ap.local.cache_files import CacheFile; file = CacheFile('found.json')\n"
    keeps += "for number in range(100): file.keep(f'{sys.argv[1]} {number}', {'value': number})"
    processes = [subprocess.Popen([sys.executable, "-c", keeps, name]) for name in ("one", "two", "three")]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert len(json.loads(file.path.read_text(encoding="utf-8"))) == 300


def test_where_a_file_cannot_be_written_a_process_knows_its_own_entries(file, monkeypatch):
    file.keep("one", {"value": 1})
    monkeypatch.setenv(FOLDER_VARIABLE, "/proc/none")
    assert file.look_up("one") is None, "it is another file"
    with pytest.raises(OSError, match="none"):
        file.keep("two", {"value": 2})
    assert file.look_up("two") == {"value": 2}


def test_a_reader_never_sees_half_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append(path.read_text()), replace(*names)))
    write_whole(path, "after")
    assert seen == ["before"] and path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
