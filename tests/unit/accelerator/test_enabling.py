"""Enabling: what the one line says before workers are there."""

from __future__ import annotations

import pytest

from moreh_ap.accelerator import enabling
from moreh_ap.settings import Options


def test_a_variable_with_nearly_the_name_of_one_that_is_read_is_warned_of(monkeypatch, capsys):
    class Starts:
        def __init__(self, options):
            self.closed = False

        def close(self):
            self.closed = True

    monkeypatch.setattr(enabling, "WorkerStarts", Starts)
    monkeypatch.setattr(enabling.garbage_at_start, "leave_out_older_objects", lambda: 1 / 0)
    monkeypatch.setenv("MOREH_DEVICES", "2")
    with pytest.raises(ZeroDivisionError):
        enabling.make_accelerator(Options())
    assert "[warning] The variable MOREH_DEVICES is not read" in "".join(capsys.readouterr())
