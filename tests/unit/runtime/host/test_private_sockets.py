"""Folders of sockets: this user's alone, and not left behind by runs that were killed as a whole."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from moreh_ap.runtime.host import private_sockets


@pytest.fixture
def place(tmp_path_factory, monkeypatch):
    folder = tempfile.mkdtemp(dir="/tmp")  # pytest's own are too long for sockets
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(private_sockets, "_folder", None)
    yield folder
    made = private_sockets._folder
    if made is not None:
        private_sockets._remove(*made)
    subprocess.run(["rm", "-rf", folder], check=True)


def make_old(folder):
    os.utime(folder, (time.time() - 3600,) * 2)


def test_the_folder_is_this_user_s_alone(place):
    folder = private_sockets.run_folder()
    assert str(folder.parent) == place and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_sockets.run_folder() == folder


def test_a_long_folder_for_temporary_files_is_not_used(place, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", place + "/" + "x" * 100)
    assert str(private_sockets.run_folder().parent) == "/tmp"


def test_a_fork_makes_its_own_and_leaves_that_of_its_parent(place):
    folder = private_sockets.run_folder()
    pid = os.fork()
    if pid == 0:
        own = private_sockets.run_folder()
        private_sockets._remove(*private_sockets._folder)
        os._exit(0 if own != folder and folder.exists() and not own.exists() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert folder.exists()


def test_abandoned_folders_are_removed_and_those_of_living_runs_stay(place):
    code = "from moreh_ap.runtime.host import private_sockets as s; print(s.run_folder(), flush=True); input()"
    environment = {**os.environ, "TMPDIR": place}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    abandoned, living, young = [run.stdout.readline().strip() for run in runs]
    for run in (runs[0], runs[2]):
        run.kill()
        run.communicate()
    another = tempfile.mkdtemp(prefix="moreh-1-", dir=place)  # of the user's own
    link = os.path.join(place, "moreh-2-abcdefgh")
    os.symlink(abandoned, link)
    for folder in (abandoned, living, another):
        make_old(folder)
    private_sockets.run_folder()
    assert [os.path.exists(folder) for folder in (abandoned, living, young)] == [False, True, True]
    assert os.path.exists(another) and os.path.islink(link)
    runs[1].communicate("\n")
    assert not os.path.exists(living)
