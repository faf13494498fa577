"""The logger of the package: what is shown, where, and from which level on."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.local import logger


@pytest.fixture(autouse=True)
def fresh_logger(monkeypatch):
    """The logger as a process finds it that has logged nothing."""
    monkeypatch.delenv(logger.LEVEL_VARIABLE, raising=False)
    ours = logging.getLogger("moreh_ap")
    before = ours.handlers[:], ours.level, ours.propagate
    ours.handlers[:], ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield ours
    ours.handlers[:], ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


def test_a_line_is_printed_once(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])  # as after logging.basicConfig()
    logger.say("one line")
    logger.say("another")
    assert capsys.readouterr() == ("[info] one line\n[info] another\n", "")


def test_lines_go_to_the_standard_output_of_that_moment(capsys):
    logger.say("before")
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        cell = io.StringIO()
        patch.setattr(sys, "stdout", cell)
        logger.say("in a cell")
    assert cell.getvalue() == "[info] in a cell\n"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("info", ["[info] detail", "[info] plan", "[warning] slow"]),
        ("Notice", ["[info] plan", "[warning] slow"]),
        ("warning", ["[warning] slow"]),
        ("error", []),
    ],
)
def test_the_level_decides_what_is_shown(capsys, monkeypatch, level, shown):
    monkeypatch.setenv(logger.LEVEL_VARIABLE, level)
    logger.say("detail")
    logger.say("plan", logger.NOTICE)
    logger.say("slow", logging.WARNING)
    assert capsys.readouterr().out.splitlines() == shown


def test_a_script_that_has_set_the_logger_up_decides(capsys, fresh_logger):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    fresh_logger.addHandler(handler)
    fresh_logger.setLevel(logging.WARNING)
    logger.say("detail")
    logger.say("100% slow", logging.WARNING)
    assert [one.getMessage() for one in records] == ["100% slow"]
    assert records[0].filename == "test_logger.py", "where the line comes from"
    assert capsys.readouterr().out == ""


def test_another_level_is_refused(monkeypatch):
    with pytest.raises(OptionError, match="MOREH_LOG_LEVEL='loud'"):
        logger.check_level({logger.LEVEL_VARIABLE: "loud"})
    assert logger.check_level({logger.LEVEL_VARIABLE: " "}) == logging.INFO


def test_a_listener_gets_lines_that_are_not_shown_and_what_is_slow_where(capsys, monkeypatch):
    monkeypatch.setenv(logger.LEVEL_VARIABLE, "warning")
    records = []
    listener = logging.Handler()
    listener.emit = records.append
    logger.listen(listener)
    logger.say("every device computes the whole batch", slow_at="train.py:3")
    logger.say("a line")
    logger.forget(listener)
    logger.say("after it")
    assert [(one.getMessage(), one.slow_at) for one in records] == [
        ("every device computes the whole batch", "train.py:3"),
        ("a line", ""),
    ]
    assert capsys.readouterr().out == ""
