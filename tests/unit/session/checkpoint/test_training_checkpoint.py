"""Files that workers wrote on hosts which do not share the checkpoint's folder, and folders into which others save."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from moreh_ap.errors import LoadError
from moreh_ap.parallelizer.state.checkpoint_files import WrittenFile
from moreh_ap.session.checkpoint.checkpoint_folder import DESCRIPTION, VERSION, open_last_whole
from moreh_ap.session.checkpoint.training_checkpoint import _taken


class Workers:
    """Takes what it is told to, with the digests that it is made with."""

    def __init__(self, digests):
        self.digests, self.asked = digests, {}

    def take(self, written):
        self.asked = dict(written)
        return {rank: self.digests[rank] for rank, (_, here) in written.items() if here}


def test_files_of_hosts_that_share_the_folder_stay_where_they_are():
    files, workers = [WrittenFile("/ckpt/1-worker0.safetensors", 8, "a", ()), None], Workers({})
    assert _taken(workers, files, "/ckpt/1-worker") == files and not workers.asked


def test_files_of_other_hosts_are_taken_compared_and_removed_if_they_could_not_be_written():
    here = WrittenFile("/ckpt/1-worker0.safetensors", 8, "a", ())
    there = [WrittenFile(f"/tmp/host/written/1-worker{rank}.safetensors", 8, "b", ()) for rank in (1, 2, 3)]
    there[2] = replace(there[2], failure="OSError: No space left on device")
    workers = Workers({1: "b", 2: "other"})
    found = _taken(workers, [here, *there], "/ckpt/1-worker")
    assert [(rank, path) for rank, (_, path) in workers.asked.items()] == [
        (1, "/ckpt/1-worker1.safetensors"),
        (2, "/ckpt/1-worker2.safetensors"),
        (3, ""),
    ]
    assert found[:2] == [here, replace(there[0], path="/ckpt/1-worker1.safetensors")]
    assert "it is not what worker 2 wrote on its host" in found[2].failure
    assert found[3].failure == "on the host of worker 3: OSError: No space left on device"


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
