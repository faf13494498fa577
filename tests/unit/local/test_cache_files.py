"""Files in which a machine remembers: where they are, and that a broken one counts as empty."""

from __future__ import annotations

import os
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


def test_a_reader_never_sees_half_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("before")
    seen = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append(path.read_text()), replace(*names)))
    write_whole(path, "after")
    assert seen == ["before"] and path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]
