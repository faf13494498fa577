"""Which modules a host is sent."""

from __future__ import annotations

import shutil

from moreh_ap.hosts import script_files
from moreh_ap.hosts.script_files import different_on_this_host, identity_of, look_at, to_send


def project(folder):
    for name, text in {
        "train.py": "import pkg",
        "pkg/__init__.py": "",
        "pkg/net.py": "net = 1",
        "other/__init__.py": "",
        "notes.txt": "no module",
        ".venv/lib.py": "no module",
        "site-packages/lib.py": "no module",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return look_at(str(folder))


def test_python_files_of_the_folder_and_of_its_packages(tmp_path):
    found = project(tmp_path / "here")
    assert sorted(found.digests) == ["other/__init__.py", "pkg/__init__.py", "pkg/net.py", "train.py"]
    assert found.is_whole and found.identity == identity_of(str(tmp_path / "here"))


def test_a_package_of_which_one_file_differs_is_sent_whole(tmp_path):
    found = project(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert different_on_this_host(str(tmp_path / "there"), found.digests) == []
    (tmp_path / "there" / "pkg" / "net.py").write_text("net = 2")
    different = different_on_this_host(str(tmp_path / "there"), found.digests)
    assert different == ["pkg/net.py"]
    assert sorted(to_send(found.digests, different)) == ["pkg/__init__.py", "pkg/net.py"]
    everything = different_on_this_host(str(tmp_path / "nowhere"), found.digests)
    assert sorted(to_send(found.digests, everything)) == sorted(found.digests)


def test_a_copy_is_not_the_same_folder(tmp_path):
    project(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert identity_of(str(tmp_path / "here")) != identity_of(str(tmp_path / "there"))
    assert identity_of(str(tmp_path / "nowhere")) == ()


def test_a_folder_with_too_much_in_it_is_not_looked_at_further(tmp_path, monkeypatch):
    monkeypatch.setattr(script_files, "MOST_FILES", 3)
    assert not project(tmp_path / "here").is_whole
