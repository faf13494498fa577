"""What is kept of commands, until when, and when losses are too many."""

from __future__ import annotations

from typing import Any

import pytest

from moreh_ap.protocol.encoding import Packed, Place
from moreh_ap.runtime.future import Reply, SentCommand
from moreh_ap.runtime.recovery import command_log
from moreh_ap.runtime.recovery.command_log import CommandLog


class Rules:
    """A command is a pair: its steps, and the files that it names. Figures are the values themselves."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, command: Any) -> Any:
        return command

    def figures(self, command: Any, values: Any) -> Any:
        return values

    def again(self, command: Any) -> Any:
        return command

    def difference(self, before: Any, after: Any) -> str:
        return "" if before == after else "different"

    def say(self, line: str) -> None:
        self.said.append(line)


def sent(number: int, steps: int = 0, files: tuple[str, ...] = (), payload: Packed | None = None) -> SentCommand:
    return SentCommand(Reply(), number, 0, False, payload or Packed(b"command"), (steps, files))


@pytest.fixture
def log() -> CommandLog:
    opened = CommandLog(Rules())
    opened.open()
    return opened


def test_answered_commands_are_in_order_and_know_how_they_ended(log):
    error = ValueError("a batch")
    for number in (1, 2, 3):
        log.add(sent(number, steps=1))
    log.answered(sent(1), ["one"], None)
    log.answered(sent(2), [], error)
    log.answered(sent(7), ["of before the log was opened"], None)
    first, second = log.answered_commands()
    assert (first.number, first.figures, first.error, first.num_steps) == (1, ["one"], None, 1)
    assert (second.number, second.figures, second.error) == (2, None, error)


@pytest.mark.parametrize(
    "name, most, command",
    [
        ("MOST_STEPS", 2, sent(1, steps=1)),
        ("MOST_BYTES", 30, sent(1, payload=Packed(b"12345", (b"12345", Place(0, 5))))),
    ],
)
def test_a_log_that_grows_too_long_is_closed_and_says_so(log, monkeypatch, name, most, command):
    monkeypatch.setattr(command_log, name, most)
    forgotten: list[str] = []
    log.when_forgotten(lambda: forgotten.append("files"))
    log.add(command)
    log.add(command._replace(number=2))
    assert log.is_open and not forgotten
    log.add(command._replace(number=3))
    assert not log.is_open and forgotten == ["files"] and log.answered_commands() == []
    (line,) = log.rules.said
    assert line == f"a worker that is lost from now on ends the run: {log.why_closed}"
    assert log.why_not(4) == log.why_closed
    log.open()
    assert not log.is_open, "what was forgotten does not come back"
    log.when_forgotten(lambda: forgotten.append("at once"))
    assert forgotten == ["files", "at once"]


def test_more_than_three_losses_at_one_command_within_ten_minutes_are_too_many(log, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(command_log.time, "monotonic", lambda: now[0])
    for _ in range(3):
        assert log.why_not(5) == log.why_not(6) == ""
        now[0] += 100
    assert log.why_not(5) == "workers were lost 4 times at the same command"
    now[0] += 550  # the three of command 6 are longer ago than ten minutes
    assert log.why_not(6) == "" and log.why_not(7) == ""


def test_a_file_that_was_written_again_cannot_be_read_again(log, tmp_path):
    kept, changed = tmp_path / "kept", tmp_path / "changed"
    kept.write_text("weights")
    changed.write_text("weights")
    log.add(sent(1, files=(str(kept), str(changed))))
    assert log.why_not(2) == ""
    changed.write_text("others, longer")
    assert log.why_not(2) == f"{changed} has been changed since workers read it"
    changed.unlink()
    assert log.why_not(2) == f"{changed} has been changed since workers read it"


def test_nothing_is_said_of_losses_before_the_log_is_opened():
    assert CommandLog(Rules()).why_not(1) == "" and not CommandLog(Rules()).is_open
