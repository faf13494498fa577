"""When as many workers as before are tried again."""

from __future__ import annotations

import pytest

from moreh_ap.runtime.recovery import missing_devices
from moreh_ap.runtime.recovery.missing_devices import FIRST_S, LONGEST_S, MissingDevices


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time."""
    now_s = [1000.0]
    monkeypatch.setattr(missing_devices.time, "monotonic", lambda: now_s[0])
    return now_s


def test_nothing_is_tried_where_nothing_was_lost(clock):
    missing = MissingDevices()
    clock[0] += 1e6
    assert missing.back(2) is None


def test_as_many_as_before_are_tried_after_a_while_and_then_ever_more_rarely(clock):
    missing, waits_s = MissingDevices(), []
    for _ in range(10):
        missing.lost(4)
        begun_s = clock[0]
        while (joined := missing.back(3)) is None:
            clock[0] += 1.0
        waits_s.append(clock[0] - begun_s)
        assert joined == ("4 workers on this machine again, 3 since a device was gone.", 4, (), None)
    assert waits_s[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and waits_s[-1] == LONGEST_S
    assert missing.back(4) is None, "they have workers"


def test_a_second_device_that_is_gone_does_not_change_how_many_there_were(clock):
    missing = MissingDevices()
    missing.lost(4)
    missing.lost(3)
    clock[0] += 1e6
    assert missing.back(2).num_workers == 4
