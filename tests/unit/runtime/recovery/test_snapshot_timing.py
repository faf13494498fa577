"""After how many steps a copy is taken."""

from __future__ import annotations

import pytest

from moreh_ap.runtime.recovery.snapshot_timing import COST, FIRST_STEPS, MOST_STEPS, TRIES, SnapshotTiming


def steps_until_due(timing: SnapshotTiming) -> int:
    for count in range(1, 1000):
        timing.stepped(1)
        if timing.is_due():
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
        assert timing.is_due(), "the next forward may find no open graph"
    for is_soon, wanted in ((True, 1), (False, 2), (False, 4), (True, 8)):
        timing.sent()
        timing.failed(is_soon)
        assert not timing.is_due() and steps_until_due(timing) == wanted
    timing.sent()
    timing.taken(0.1, 1.0)
    timing.sent()
    timing.failed(is_soon=True)
    assert timing.is_due()
