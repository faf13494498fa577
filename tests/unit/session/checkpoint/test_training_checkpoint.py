"""Folders into which others save."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from moreh_ap.errors import LoadError
from moreh_ap.session.checkpoint.checkpoint_folder import DESCRIPTION, VERSION, open_last_whole


def describe(folder: Path, number: int) -> None:
    """Writes the description of a checkpoint without tensors, as a save does: beside, and then in the place."""
    content = {
        "format": "moreh_ap checkpoint",
        "version": VERSION,
        "files": {},
        "tensors": {},
        "saved": {"at": str(number), "by": "a test"},
    }
    (folder / "new").write_text(json.dumps(content))
    (folder / "new").rename(folder / DESCRIPTION)


def test_what_another_run_removes_while_it_saves_is_no_damage(tmp_path: Path) -> None:
    describe(tmp_path, 1)
    looks = []

    def find_problems(files: object) -> dict[str, str]:
        looks.append(files)
        if len(looks) > 2:
            return {}
        describe(tmp_path, 1 + len(looks))  # the files of the one before are gone then
        return {"old.safetensors": "it cannot be read: No such file or directory"}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_last_whole(tmp_path, verify=False, find_problems=find_problems).saved_at == "saved 3 by a test"
    assert len(looks) == 3


def test_what_is_damaged_in_a_folder_in_which_nothing_changes_is_looked_at_once(tmp_path: Path) -> None:
    describe(tmp_path, 1)
    looks = []

    def find_problems(files: object) -> dict[str, str]:
        looks.append(files)
        return {"old.safetensors": "it is torn"}

    with pytest.raises(LoadError, match=r"old\.safetensors is damaged: it is torn"):
        open_last_whole(tmp_path, verify=False, find_problems=find_problems)
    assert len(looks) == 1
