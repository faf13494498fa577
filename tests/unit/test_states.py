"""States of accelerators, sessions and models: which may follow which, and who is told."""

from __future__ import annotations

import enum
import re
from pathlib import Path

import pytest

from moreh_ap.states import AFTER, AcceleratorState, ModelPhase, SessionState, StateMachine

ARCHITECTURE = [Path(__file__).parents[2] / "docs" / name for name in ("architecture.md", "architecture.ko.md")]


@pytest.mark.parametrize("page", ARCHITECTURE, ids=lambda page: page.name)
def test_the_page_on_architecture_has_the_same_table(page: Path) -> None:
    rows = re.findall(r"^\| `(\w+)\.(\w+)` \| .+ \| (.*)\|$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = {(kind, name): set(re.findall(r"`(\w+)`", following)) for kind, name, following in rows}
    assert listed == {
        (type(one).__name__, one.name): {next_one.name for next_one in after} for one, after in AFTER.items()
    }


@pytest.mark.parametrize("states", [AcceleratorState, SessionState, ModelPhase])
def test_each_state_says_what_it_means_and_what_may_follow_it(states: type[enum.Enum]) -> None:
    for state in states:
        assert len(state.value) > 20 and AFTER[state] <= set(states) - {state}
        assert state is next(iter(states)) or any(state in AFTER[other] for other in states)


def test_only_what_may_follow_is_entered() -> None:
    machine = StateMachine(AcceleratorState.STARTING)
    assert not machine.enter(AcceleratorState.STARTING)
    assert not machine.enter(AcceleratorState.READY, only_from=AcceleratorState.READY)
    assert machine.enter(AcceleratorState.CLOSED, only_from=AcceleratorState.STARTING)
    with pytest.raises(RuntimeError, match=r"AcceleratorState\.CLOSED cannot be followed by AcceleratorState\.READY"):
        machine.enter(AcceleratorState.READY)
    assert machine.current is AcceleratorState.CLOSED


def test_leaving_a_state_is_told_once_and_at_once_where_it_is_left_already() -> None:
    machine, told = StateMachine(SessionState.EMPTY), []
    machine.when_left(SessionState.REPLAYABLE, lambda: told.append("never there"))
    machine.enter(SessionState.REPLAYABLE)
    machine.when_left(SessionState.REPLAYABLE, lambda: told.append(machine.current.name))
    assert told == ["never there"]
    machine.enter(SessionState.UNREPLAYABLE)
    machine.enter(SessionState.REPLAYABLE)
    machine.enter(SessionState.UNREPLAYABLE)
    assert told == ["never there", "UNREPLAYABLE"]
