"""After how many steps a copy is taken."""

from __future__ import annotations

import math

import pytest

from moreh_ap.runtime.recovery import snapshot_timing
from moreh_ap.runtime.recovery.snapshot_timing import (
    COST,
    FIRST_S,
    FIRST_STEPS,
    MOST_FRUGAL_STEPS,
    MOST_STEPS,
    TRIES,
    SnapshotTiming,
)


def steps_until_due(timing: SnapshotTiming) -> int:
    for count in range(1, 1000):
        timing.stepped(1)
        if timing.num_steps >= timing.wanted:
            return count
    raise AssertionError("never")


@pytest.mark.parametrize("copy_s, wanted", [(0.0001, 1), (0.05, 50), (10.0, MOST_STEPS)])
def test_copies_take_a_fixed_part_of_the_time_of_steps(copy_s, wanted):
    timing, step_s = SnapshotTiming(), 0.1
    assert steps_until_due(timing) == FIRST_STEPS
    timing.sent()
    timing.stepped(3)  # which are sent before the copy is there
    timing.taken(1.0, 0.0)
    assert steps_until_due(timing) == FIRST_STEPS - 3, "the first one says nothing of steps"
    timing.sent()
    timing.taken(copy_s, FIRST_STEPS * step_s)
    count = steps_until_due(timing)
    assert count == wanted
    assert wanted != 50 or copy_s == pytest.approx(COST * count * step_s)


def test_where_there_could_be_none_the_next_forward_tries_again_or_a_later_step():
    timing = SnapshotTiming()
    for _ in range(TRIES):
        timing.sent()
        timing.failed(is_soon=True)
        assert timing.num_steps >= timing.wanted, "the next forward may find no open graph"
    for is_soon, wanted in ((True, 1), (False, 2), (False, 4), (True, 8)):
        timing.sent()
        timing.failed(is_soon)
        assert timing.num_steps < timing.wanted and steps_until_due(timing) == wanted
    timing.sent()
    timing.taken(0.1, 1.0)
    timing.sent()
    timing.failed(is_soon=True)
    assert timing.num_steps >= timing.wanted


def test_where_copies_may_cost_only_so_much_the_first_one_waits_too(monkeypatch):
    class Clock:
        now_s = 50.0
        monotonic = staticmethod(lambda: Clock.now_s)

    monkeypatch.setattr(snapshot_timing, "time", Clock)
    timing = SnapshotTiming(is_frugal=True)
    Clock.now_s += 100
    timing.stepped(FIRST_STEPS)
    assert timing.num_steps >= timing.wanted and not timing.is_affordable(), "time before the first step does not count"
    Clock.now_s += FIRST_S
    assert timing.is_affordable() and timing.most_s() == pytest.approx(COST * FIRST_S)
    timing.sent()
    timing.failed(is_soon=False, needed_s=0.2)
    timing.stepped(10)
    assert not timing.is_affordable()
    Clock.now_s += 0.2 / COST
    assert timing.is_affordable()
    timing.sent()
    timing.taken(0.3, 0.0)
    assert timing.wanted == math.ceil(0.3 * 20 / (COST * (FIRST_S + 20))), "20 steps since the first"
    timing.stepped(timing.wanted)
    assert timing.is_affordable() and timing.most_s() == math.inf
    for count, costs in ((2, False), (3, True)):
        timing.sent()
        timing.taken(100.0, 10.0)
        assert timing.costs_too_much == costs, f"copy {count}: the first ones go to memory that nobody has touched"
        timing.stepped(MOST_FRUGAL_STEPS)
