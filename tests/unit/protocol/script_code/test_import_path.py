"""Folders that a script adds to its import path after its workers were started."""

from __future__ import annotations

import sys

from moreh_ap.hosts.host_files import FOLDER_VARIABLE, SCRIPT_VARIABLE
from moreh_ap.protocol.script_code.import_path import AddedFolder, ImportPath, add_here


def test_added_folders_are_told_once_each_with_the_entry_that_follows():
    path = ImportPath(["/job", "/lib"])
    present = ["/job/first", "/job", "/job/second", "/job/third", "/lib", "/last"]
    added = path.news(present)
    assert added == (
        AddedFolder("/job/first", "/job"),
        AddedFolder("/job/second", "/lib"),
        AddedFolder("/job/third", "/lib"),
        AddedFolder("/last", ""),
    )
    assert path.news(present) == () == path.news(["/job"])


def test_a_worker_has_the_same_order_and_an_entry_that_it_has_is_left(monkeypatch):
    present = ["/job/first", "/job", "/job/second", "/job/third", "/lib", "/last"]
    added = ImportPath(["/job", "/lib"]).news(present)
    monkeypatch.setattr(sys, "path", ["/job", "/lib", "/of/the/worker"])
    add_here(added)
    add_here(added)
    assert sys.path == [*present[:-1], "/of/the/worker", "/last"]


def test_a_worker_of_another_host_looks_first_where_modules_were_sent(monkeypatch):
    added = ImportPath(["/job", "/lib"]).news(["/job/src", "/job", "/lib", "/elsewhere"])
    monkeypatch.setattr(sys, "path", ["/sent/script", "/job", "/lib"])
    monkeypatch.setenv(FOLDER_VARIABLE, "/sent")
    monkeypatch.setenv(SCRIPT_VARIABLE, "/job")
    add_here(added)
    assert sys.path == ["/sent/script/src", "/job/src", "/sent/script", "/job", "/lib", "/elsewhere"]
