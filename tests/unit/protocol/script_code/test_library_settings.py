"""Settings that a library keeps for itself, as its functions change them and its modules read them."""

from __future__ import annotations

import enum
import importlib
import sys
from pathlib import Path

import pytest

from moreh_ap.protocol.script_code.library_settings import settings_of
from moreh_ap.protocol.script_code.script_globals import PATH, read_by

LIBRARY = """
import enum, threading
from torch import nn

class Kind(enum.Enum):
    MEAN = "mean"
    SAMPLE = "sample"

class Mode:
    def __init__(self):
        self.kind, self.made, self.lock = None, 1, threading.Lock()

    def set(self, kind):
        self.kind = kind

mode, table = Mode(), {"a": 1}

class Sampler(nn.Module):
    def forward(self, x):
        return x if mode.kind is Kind.MEAN else -x
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed: its file lies in a folder of packages."""
    folder = Path(tmp_path) / "site-packages"
    folder.mkdir()
    (folder / "sampling_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("sampling_library")
    del sys.modules["sampling_library"]


def test_attributes_that_methods_set_are_settings(library):
    assert [(space is vars(library), name) for space, name in settings_of(library.Sampler())] == [(True, "mode.kind")]


def test_a_setting_is_read_and_set_as_a_variable(library):
    (variable,) = [one for one in read_by(library.Sampler()) if one.path == f"{PATH}sampling_library"]
    assert variable.is_imported and variable.value() is None
    library.mode.set(library.Kind.SAMPLE)
    assert variable.value() is library.Kind.SAMPLE and isinstance(variable.value(), enum.Enum)
    variable.set(library.Kind.MEAN)
    assert library.mode.kind is library.Kind.MEAN
