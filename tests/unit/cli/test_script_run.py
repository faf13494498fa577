"""How a script is run and left: its arguments, its errors, and what is restored."""

from __future__ import annotations

import contextlib
import sys

import pytest

from moreh_ap.cli import script_run
from moreh_ap.errors import OptionError


@pytest.fixture
def calls(monkeypatch):
    """Makes `sys.call(root, call)` in a script the first call of a model, without any accelerator."""

    @contextlib.contextmanager
    def watching(watch):
        monkeypatch.setattr(sys, "call", watch, raising=False)
        yield

    monkeypatch.setattr(script_run.first_call, "watching", watching)
    monkeypatch.setattr(script_run.device, "disable", lambda: None)


def run(tmp_path, text, *arguments):
    path = tmp_path / "train.py"
    path.write_text(text)
    return script_run.run_until_first_call(path, list(arguments), lambda root, call: (root, call, sys.argv[1:]))


def test_a_script_is_left_at_its_first_call(calls, tmp_path, capsys):
    before = sys.argv, sys.path[:]
    text = "import sys\ntry:\n    sys.call('model', 'call')\nexcept Exception:\n    pass\nprint('too late')\n"
    assert run(tmp_path, text, "--lr", "1") == ("model", "call", ["--lr", "1"])
    assert capsys.readouterr().out == ""
    assert (sys.argv, sys.path) == before


@pytest.mark.parametrize(("text", "ending"), [("", "it ended"), ("raise SystemExit(3)", "it exited with 3")])
def test_a_script_without_a_call_says_how_it_ended(calls, tmp_path, text, ending):
    with pytest.raises(OptionError, match=f"gives nothing to verify: {ending}"):
        run(tmp_path, text)


def test_an_error_of_the_script_is_its_own(calls, tmp_path):
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, "1 / 0")
    with pytest.raises(OptionError, match="there is no file"):
        script_run.run_until_first_call(tmp_path / "no.py", [], lambda root, call: None)
