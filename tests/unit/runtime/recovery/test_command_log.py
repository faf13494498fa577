"""What is kept of commands, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from moreh_ap.protocol.encoding import Packed, Place, WorkerTraceback
from moreh_ap.runtime.future import Reply, SentCommand
from moreh_ap.runtime.recovery import command_log, snapshot_timing
from moreh_ap.runtime.recovery.command_log import CommandLog
from moreh_ap.runtime.recovery.rules import Noted, Taken


class Rules:
    """A command is a `Noted`. Figures are the values themselves, and what a snapshot answers is a `Taken`."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.dropped: list[tuple[Any, int | None]] = []
        self.num_asked = 0
        self.is_saving = False
        self.is_elsewhere = False

    def copy_elsewhere(self) -> None:
        self.is_elsewhere = True

    def may_copy(self) -> bool:
        return not self.is_saving

    def next_snapshot(self, most_bytes: int, most_s: float) -> Any:
        self.num_asked += 1
        self.most_bytes, self.most_s = most_bytes, most_s
        return f"snapshot {self.num_asked}"

    def snapshot_after_error(self, most_bytes: int) -> Any:
        return f"snapshot of at most {most_bytes} bytes"

    def taken(self, command: Any, values: Any) -> Any:
        return values

    def drop(self, command: Any, num_done: int | None) -> None:
        self.dropped.append((command, num_done))

    def from_snapshot(self, command: Any) -> Any:
        return Noted(0, command.files)

    def behind_snapshot(self, command: Any, values: Any) -> Any:
        return ["behind it"]

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

    def say_more(self, line: str) -> None:
        self.said_more = line


class Copies:
    """Keeps copies that may have some bytes."""

    def __init__(self, most_bytes: int = 1000) -> None:
        self.free_bytes, self.is_closed = most_bytes, False
        self.has_disk = False

    def most_bytes(self) -> int:
        return self.free_bytes

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= 2 * self.free_bytes

    def move_to_disk(self, num_bytes: int, largest_bytes: int) -> tuple[bool, str]:
        assert num_bytes >= largest_bytes
        return self.has_disk, f"two need {2 * num_bytes} bytes"

    def close(self) -> None:
        self.is_closed = True


def log_of(copies: Copies | None = None, *, is_frugal: bool = False) -> CommandLog:
    kept = copies or Copies()
    opened = CommandLog(Rules, is_frugal=is_frugal)
    opened.copies = lambda: kept
    opened.open()
    return opened


def sent(number: int, steps: int = 0, files: tuple[str, ...] = (), payload: Packed | None = None) -> SentCommand:
    return SentCommand(Reply(), number, 0, False, payload or Packed(b"command"), Noted(steps, files))


@pytest.fixture
def log() -> CommandLog:
    return log_of()


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
    closed = CommandLog(Rules)
    assert closed.why_not(1) == "" and not closed.is_open


def with_snapshot(number: int, files: tuple[str, ...] = ()) -> SentCommand:
    return SentCommand(Reply(), number, 0, False, Packed(b"snapshot"), Noted(1, files, has_snapshot=True))


@pytest.fixture
def every_third(log, monkeypatch):
    """A log that wants a snapshot after three steps."""
    monkeypatch.setattr(snapshot_timing, "STEPS", 3)
    return log_of()


def test_a_snapshot_stands_for_what_came_before_it_once_all_workers_have_answered(every_third, tmp_path):
    log, files = every_third, tuple(str(tmp_path / name) for name in "ab")
    for number in (1, 2):
        log.add(sent(number, steps=1, files=files[:1]))
        log.answered(sent(number), ["figures"], None)
    assert log.wanted is None
    log.add(sent(3, steps=1))
    assert log.wanted == "snapshot 1"
    log.add(with_snapshot(4, files[1:]))
    log.add(sent(5, steps=1))
    assert log.wanted is None and log.rules.num_asked == 1, "one at a time"
    log.answered(sent(3), [], None)
    assert [one.number for one in log.answered_commands()] == [1, 2, 3], "what is lost now is computed again"
    log.answered(with_snapshot(4), Taken("", seconds=0.1), None)
    log.answered(sent(5), ["loss"], None)
    first, second = log.answered_commands()
    assert (first.number, first.origin, first.num_steps) == (4, Noted(0, files[1:]), 0)
    assert first.figures == ["behind it"], "what was answered before it in its message is not computed again"
    assert (second.number, second.figures, second.num_steps) == (5, ["loss"], 1)
    assert [one.num_steps for one, _ in log.rules.dropped] == [1, 1, 1]
    (tmp_path / "a").write_text("the model's file, which is not needed any more")
    assert log.why_not(6) == ""
    (tmp_path / "b").write_text("the other one is")
    assert log.why_not(6).startswith(files[1])


def test_of_messages_that_ended_in_an_error_counts_what_was_carried_out(every_third):
    log, error = every_third, ValueError("a batch")
    error.__cause__ = WorkerTraceback(0, "", num_done=2)
    for number in (1, 2, 3):
        log.add(sent(number, steps=1))
    log.answered(sent(1), [], None)
    log.answered(sent(2), [], error)
    log.answered(sent(3), [], error)  # skipped
    log.add(with_snapshot(4))
    log.answered(with_snapshot(4), Taken(""), None)
    assert [num_done for _, num_done in log.rules.dropped] == [None, 2, 0]


def test_without_a_copy_everything_stays_and_the_log_closes_as_before(every_third, monkeypatch):
    log = every_third
    monkeypatch.setattr(command_log, "MOST_STEPS", 11)
    for number in range(1, 19, 2):
        log.add(sent(number, steps=1))
        if log.wanted is not None:
            log.add(with_snapshot(number + 1))
            log.answered(with_snapshot(number + 1), Taken("a lambda"), None)
    assert log.rules.num_asked == 2, "after three steps, and after six more"
    assert log.rules.dropped == [] and log.is_open
    log.add(sent(20, steps=1))
    why = "more than 11 steps would have to be computed again (no copy of what workers hold: a lambda)"
    assert log.why_closed == why
    assert log.copies().is_closed


def test_where_there_is_no_memory_for_copies_that_is_said_once(every_third):
    log = every_third
    for number in (1, 2, 3):
        log.add(sent(number, steps=1))
    log.add(with_snapshot(4))
    log.answered(with_snapshot(4), Taken("too large", is_too_large=True, num_bytes=3000, largest_bytes=2000), None)
    for number in range(5, 20):
        log.add(sent(number, steps=1))
    assert log.rules.num_asked == 1
    (line,) = log.rules.said
    instead = "a worker can be lost in the first 500 steps only"
    needed = "there is no memory for copies of what workers hold (two need 6000 bytes)"
    assert line == f"{needed}: {instead}. Save checkpoints: MOREH_AUTOSAVE=folder does it by itself"


@pytest.mark.parametrize("num_bytes, is_elsewhere", [(1500, False), (3000, True)])
def test_copies_that_are_larger_than_a_share_fit_together_or_are_on_disk(every_third, num_bytes, is_elsewhere):
    log = every_third
    log.copies().has_disk = True
    for number in (1, 2, 3):
        log.add(sent(number, steps=1))
    log.add(with_snapshot(4))
    log.answered(with_snapshot(4), Taken("too large", is_too_large=True, num_bytes=num_bytes, largest_bytes=1400), None)
    log.add(sent(5, steps=1))
    assert log.wanted == "snapshot 2" and log.rules.is_elsewhere == is_elsewhere
    assert log.rules.most_bytes == (1000 if is_elsewhere else 1400), "on disk there is another share"
    assert len(log.rules.said) == is_elsewhere
    log.add(with_snapshot(6))
    log.answered(with_snapshot(6), Taken(""), None)
    assert log.has_copy
    log.add(with_snapshot(7))
    log.answered(with_snapshot(7), Taken("too large", is_too_large=True, num_bytes=3000, largest_bytes=2000), None)
    assert "(they have become larger than they may be)" in log.rules.said[-1], "the copy that is complete is needed"


def test_a_snapshot_is_due_for_many_bytes_too(monkeypatch):
    monkeypatch.setattr(command_log, "SNAPSHOT_BYTES", 10)
    log = log_of()
    log.add(sent(1))
    assert log.wanted is None
    log.add(sent(2))
    assert log.wanted == "snapshot 1"


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(snapshot_timing, "time", made)
    return made


@pytest.fixture
def frugal(clock, monkeypatch) -> CommandLog:
    """One in which the first command is one too many."""
    monkeypatch.setattr(command_log, "FEW_COMMANDS", 0)
    return log_of(is_frugal=True)


def train(log: CommandLog, first: int, last: int) -> None:
    for number in range(first, last + 1):
        log.add(sent(number, steps=1))
        log.answered(sent(number), ["loss"], None)


def test_a_frugal_log_keeps_nothing_of_a_run_that_is_short_or_does_not_train(frugal, clock, monkeypatch):
    monkeypatch.setattr(command_log, "MOST_BYTES", 50)
    forgotten: list[str] = []
    for number in range(1, 30):  # all are on their way at once
        frugal.add(sent(number))
    for number in range(1, 30):
        frugal.answered(sent(number), ["logits"], None)
    clock.now_s += 100
    frugal.when_forgotten(lambda: forgotten.append("files"))
    train(frugal, 30, 60)
    assert forgotten == ["files"] and frugal.answered_commands() == [] and len(frugal.rules.dropped) == 60
    assert frugal.wanted is None and not frugal.keeps_values and not frugal.is_complete and frugal.is_open
    clock.now_s += snapshot_timing.FIRST_S
    train(frugal, 61, 61)
    assert frugal.wanted == "snapshot 1" and frugal.rules.most_s == pytest.approx(0.01 * snapshot_timing.FIRST_S)
    assert frugal.keeps_values, "what follows a copy may be sent again"


@pytest.mark.parametrize("name, most", [("MOST_STEPS", 5), ("FEW_BYTES", 35), ("FEW_COMMANDS", 5)])
def test_a_frugal_log_is_complete_as_long_as_it_is_short(clock, monkeypatch, name, most):
    monkeypatch.setattr(command_log, name, most)
    log, forgotten = log_of(is_frugal=True), []
    log.when_forgotten(lambda: forgotten.append("files"))
    train(log, 1, 5)
    assert log.is_complete and log.keeps_values and len(log.answered_commands()) == 5 and not forgotten
    log.add(sent(6, steps=1))
    assert not log.is_complete and not log.keeps_values and log.is_open
    log.answered(sent(6), ["loss"], None)
    assert log.answered_commands() == [] and len(log.rules.dropped) == 6 and forgotten == ["files"]
    assert log.rules.said == [], "a run that does not train is told nothing"


def test_a_frugal_log_asks_once_for_a_copy_that_may_cost_more_when_it_gets_too_long(clock, monkeypatch):
    monkeypatch.setattr(command_log, "FEW_COMMANDS", 5)
    log = log_of(is_frugal=True)
    train(log, 1, 5)
    clock.now_s += 4
    train(log, 6, 6)
    assert log.wanted == "snapshot 1" and log.rules.most_s == pytest.approx(4 * snapshot_timing.EARLY_COST)
    log.add(with_snapshot(7))
    log.add(sent(8, steps=1))
    assert log.is_complete and len(log.answered_commands()) == 6
    log.answered(with_snapshot(7), Taken("it would take longer", needed_s=0.3), None)
    log.answered(sent(8), ["loss"], None)
    assert log.is_complete and len(log.answered_commands()) == 8, "until the next command"
    train(log, 9, 9)
    assert not log.is_complete and log.answered_commands() == [] and log.wanted is None
    clock.now_s += 30
    train(log, 10, 20)
    assert log.wanted == "snapshot 2" and log.rules.most_s == pytest.approx(34 * snapshot_timing.COST)


def test_a_short_frugal_log_waits_for_the_copy_that_was_asked_for(clock, monkeypatch):
    monkeypatch.setattr(command_log, "FEW_COMMANDS", 12)
    log = log_of(is_frugal=True)
    train(log, 1, 10)
    clock.now_s += 10
    train(log, 11, 11)
    assert log.wanted == "snapshot 1"
    log.add(sent(12, steps=1))
    log.add(with_snapshot(13))
    train(log, 14, 15)
    assert log.is_complete and log.num_copies == 0
    log.answered(with_snapshot(13), Taken("a lambda"), None)
    train(log, 16, 16)
    assert log.wanted == "snapshot 2" and log.is_complete, "one that may cost more"
    log.add(with_snapshot(17))
    log.answered(with_snapshot(17), Taken("a lambda"), None)
    train(log, 18, 18)
    assert not log.is_complete and log.answered_commands() == []


def test_a_frugal_log_is_complete_once_the_first_copy_is(frugal, clock):
    train(frugal, 1, 10)
    clock.now_s += 10
    frugal.add(sent(11, steps=1))
    frugal.add(with_snapshot(12))
    frugal.when_forgotten(lambda: forgotten.append("of before"))
    frugal.add(sent(13, steps=1))
    forgotten: list[str] = []
    frugal.when_forgotten(lambda: forgotten.append("of after"))
    frugal.answered(sent(11), ["loss"], None)
    assert frugal.answered_commands() == [] and not frugal.is_complete
    frugal.answered(with_snapshot(12), Taken("", seconds=0.05, num_bytes=3 << 20), None)
    assert frugal.is_complete and forgotten == []
    assert "3 MiB" in frugal.rules.said_more and frugal.rules.said == []
    frugal.answered(sent(13), ["loss"], None)
    assert [one.number for one in frugal.answered_commands()] == [12, 13]
    assert [one.num_steps for one, _ in frugal.rules.dropped] == [1] * 11
    frugal.close("over")
    assert forgotten == ["of before", "of after"]


def test_a_frugal_log_waits_until_a_copy_is_cheap_enough(frugal, clock):
    train(frugal, 1, 10)
    clock.now_s += 10
    train(frugal, 11, 11)
    frugal.add(with_snapshot(12))
    frugal.answered(with_snapshot(12), Taken("it would take longer", needed_s=2.0), None)
    assert not frugal.is_complete and not frugal.keeps_values and frugal.answered_commands() == []
    clock.now_s += 150
    train(frugal, 13, 30)
    assert frugal.wanted is None
    clock.now_s += 50
    train(frugal, 31, 31)
    assert frugal.wanted == "snapshot 2" and frugal.rules.most_s > 2.0


@pytest.mark.parametrize(
    "taken, why",
    [
        (
            Taken("too large", is_too_large=True, num_bytes=3000),
            "there is no memory for copies of what workers hold (two need 6000 bytes)",
        ),
        (Taken("a lambda"), "what workers hold cannot be copied: a lambda"),
        (
            Taken("", seconds=60.0, since_s=10.0),
            "a copy of what workers hold takes 60.0 s, too long for short steps",
        ),
    ],
)
def test_a_frugal_log_says_once_why_there_are_no_copies(frugal, clock, taken, why):
    number = 0
    while frugal.is_open:
        number += 1
        clock.now_s += 10
        frugal.add(sent(number, steps=1))
        frugal.answered(sent(number), [], None)
        if frugal.wanted is not None:
            number += 1
            frugal.add(with_snapshot(number))
            frugal.answered(with_snapshot(number), taken, None)
        assert number < 20_000
    instead = f". {command_log.INSTEAD}" if taken.is_too_large else ""
    assert frugal.rules.said == [f"a worker that is lost from now on ends the run: {why}{instead}"]
    assert not frugal.keeps_values and not frugal.is_complete and frugal.why_not(number) == why


def test_what_was_not_carried_out_before_the_first_copy_makes_no_structure(frugal):
    error = ValueError("a batch")
    error.__cause__ = WorkerTraceback(0, "", num_done=2)
    for number in (1, 2):
        frugal.add(sent(number))
        frugal.answered(sent(number), [], error)
    assert [num_done for _, num_done in frugal.rules.dropped] == [2, 0]


def test_no_copy_is_asked_for_while_files_are_written_that_are_in_none(every_third):
    log = every_third
    log.rules.is_saving = True
    for number in range(1, 6):
        log.add(sent(number, steps=1))
    assert log.wanted is None and log.rules.num_asked == 0
    log.rules.is_saving = False
    log.add(sent(6, steps=1))
    assert log.wanted == "snapshot 1"


def test_commands_behind_those_that_are_kept_are_forgotten(log):
    for number in (1, 2, 3):
        log.add(sent(number, steps=1))
    log.wanted = "snapshot"
    for number in (1, 2):
        log.answered(sent(number), [], None)
    log._most_copy_bytes = 10  # for as many workers as there were
    log.keep_only(log.answered_commands())
    assert [one.number for one in log.answered_commands()] == [1, 2] and log.wanted is None
    assert log._next_snapshot() == "snapshot 1" and log.rules.most_bytes == 1000
    log.add(sent(3, steps=1))
    assert sum(one.num_steps for one in log._commands.values()) == 3 == log._num_steps


def test_a_copy_after_an_error_makes_a_frugal_log_complete(frugal):
    train(frugal, 1, 2)
    frugal.add(sent(3, steps=1))
    frugal.answered(sent(3), [], MemoryError("of all workers"))
    assert frugal.snapshot_after_error() == "snapshot of at most 1000 bytes" and not frugal.is_complete
    frugal.add(with_snapshot(4))
    frugal.answered(with_snapshot(4), Taken("", seconds=0.1), None)
    assert frugal.is_complete and [one.number for one in frugal.answered_commands()] == [4]
    assert log_of(Copies(0), is_frugal=True).snapshot_after_error() is None


def test_where_nothing_outlives_a_worker_there_are_no_copies_and_a_frugal_log_ends(clock, monkeypatch):
    monkeypatch.setattr(snapshot_timing, "STEPS", 1)
    for one in (log_of(Copies(0)), frugal := log_of(Copies(0), is_frugal=True)):
        train(one, 1, 3)
        assert one.wanted is None and not one.has_copy and one.is_open == (one is not frugal)
    assert frugal.why_closed == "there is no memory that outlives a worker on this system"


def test_how_large_copies_may_be_is_found_out_before_there_are_any(every_third):
    log = every_third
    train(log, 1, 3)
    log.copies().free_bytes = 10  # what is free beside the copies
    log.add(with_snapshot(4))
    log.answered(with_snapshot(4), Taken("", seconds=0.1), None)
    assert log.has_copy
    train(log, 5, 8)
    assert log.rules.num_asked == 2 and log.rules.most_bytes == 1000
    log.memory_differs()
    assert log._next_snapshot() == "snapshot 3" and log.rules.most_bytes == 10
