"""Importing Monarch adds no environment variable: another thread may look one up at that moment."""

import json
import os
import subprocess
import sys

from moreh_ap.runtime import engine_variables

SCRIPT = """
import ctypes, json, os
from moreh_ap.runtime import engine_variables

def names():
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    index, found = 0, []
    while environ[index]:
        found.append(environ[index].decode(errors="replace").partition("=")[0])
        index += 1
    return found

os.environ["MONARCH_FILE_LOG"] = "of the script"
before = names()
engine_variables.add()
added = names()
import monarch.actor
imported = names()
engine_variables.take_away()
print(json.dumps([before, added, imported, names(), os.environ["MONARCH_FILE_LOG"]]))
"""


def test_importing_monarch_adds_no_variable():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, added, imported, after, value = json.loads(done.stdout)
    assert len(added) > len(before)
    assert imported == added
    assert sorted(after) == sorted(before)
    assert value == "of the script"


def test_workers_that_are_closed_at_once_leave_the_variables_to_the_next_ones(monkeypatch):
    monkeypatch.setattr(engine_variables, "_before", None)
    monkeypatch.delitem(sys.modules, "monarch", raising=False)
    for name in (*engine_variables.of_worker(), "FURTHER"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        engine_variables.add({"FURTHER": "1"})
        assert os.environ["FURTHER"] == "1"
        engine_variables.take_away()
        assert "FURTHER" not in os.environ
    monkeypatch.setitem(sys.modules, "monarch", sys)
    engine_variables.add()
    engine_variables.take_away()
    engine_variables.add()
    assert "MONARCH_FILE_LOG" not in os.environ, "it has been read"
