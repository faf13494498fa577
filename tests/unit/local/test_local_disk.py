"""A folder on a local disk, not in memory or on another machine."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from moreh_ap.local import local_disk
from moreh_ap.local.local_disk import DiskFolder, disk_folder


@pytest.mark.parametrize(
    "kinds, chosen",
    [
        ({"/": "ext4"}, "temporary"),
        ({"/": "ext4", "temporary": "tmpfs"}, "other"),
        ({"/": "nfs4"}, None),
        ({"/": "nfs4", "other": "xfs"}, "other"),
        ({"/": "fuse.sshfs"}, None),
        ({}, "temporary"),
    ],
)
def test_a_folder_in_memory_or_of_another_machine_is_not_taken(monkeypatch, tmp_path, kinds, chosen):
    folders = {name: str(tmp_path / name) for name in ("temporary", "other")}
    for folder in folders.values():
        os.mkdir(folder)
    parts = [SimpleNamespace(mountpoint=folders.get(name, name), fstype=kind) for name, kind in kinds.items()]
    monkeypatch.setattr(local_disk.psutil, "disk_partitions", lambda all: parts)
    monkeypatch.setattr(local_disk.tempfile, "gettempdir", lambda: folders["temporary"])
    monkeypatch.setattr(local_disk, "_OTHER_FOLDER", folders["other"])
    found = disk_folder()
    assert (found and found.path) == (chosen and folders[chosen])
    assert found is None or abs(found.free_bytes - found.now_free_bytes()) < 1 << 34


def test_a_file_has_no_name_in_its_folder(tmp_path):
    descriptor = DiskFolder(str(tmp_path), 0).unnamed_file("a")
    assert os.listdir(tmp_path) == [] and os.readlink(f"/proc/self/fd/{descriptor}") == f"{tmp_path}/a (deleted)"
    os.close(descriptor)
