"""Callbacks when an import begins; those when it is done are tested with what uses them."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from moreh_ap.import_hook import when_import_begins


@pytest.fixture
def module(monkeypatch, tmp_path):
    (tmp_path / "begun_module.py").write_text("import sys\nSEEN = list(sys.begun)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "begun", [], raising=False)
    importlib.invalidate_caches()
    yield "begun_module"
    sys.modules.pop("begun_module", None)


def test_called_once_before_the_module_runs(module):
    finders = list(sys.meta_path)
    when_import_begins(module, lambda: sys.begun.append("told"))
    assert importlib.util.find_spec(module) is not None
    assert sys.begun == [], "looked for, but not imported"
    assert importlib.import_module(module).SEEN == ["told"]
    assert sys.meta_path == finders
    when_import_begins(module, lambda: sys.begun.append("at once"))
    assert sys.begun == ["told", "at once"]


def test_withdrawn(module):
    finders = list(sys.meta_path)
    when_import_begins(module, lambda: sys.begun.append("told"))()
    assert sys.meta_path == finders
    assert importlib.import_module(module).SEEN == []
