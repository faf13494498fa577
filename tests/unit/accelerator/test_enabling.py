"""Enabling: what the one line says before workers are there."""

from __future__ import annotations

import pytest

from moreh_ap.accelerator import enabling
from moreh_ap.errors import OptionError
from moreh_ap.plan import Plan
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


def test_a_call_with_other_options_says_what_differs_and_nothing_else(monkeypatch):
    class InUse:
        options = Options(plan=Plan(replicate=2), autotune=True)

        def has_ended(self):
            return False

        def in_use(self):
            return True

    monkeypatch.setattr(enabling.device, "current", InUse)
    with pytest.raises(OptionError) as caught:
        enabling.enable(Options(plan=Plan(shard=2), autotune=True, mixed_precision=False))
    assert str(caught.value).splitlines()[0] == (
        "The accelerator is in use with mixed_precision=True, plan='replicate=2'; "
        "this call asks for mixed_precision=False, plan='shard=2'."
    )


def test_a_worker_that_imports_a_module_with_the_line_makes_no_accelerator(monkeypatch):
    monkeypatch.setenv("MOREH_AP_WORKER", "0")
    monkeypatch.setattr(enabling.MAKES, "make", lambda options: 1 / 0)
    enabling.enable(Options())
    monkeypatch.delenv("MOREH_AP_WORKER")
    with pytest.raises(ZeroDivisionError):
        enabling.enable(Options())
