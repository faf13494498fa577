"""When losses are too many to be coincidence."""

from __future__ import annotations

from moreh_ap.runtime.recovery import losses
from moreh_ap.runtime.recovery.losses import Losses


def test_more_than_three_losses_at_one_command_within_ten_minutes_are_too_many(monkeypatch):
    now, found = [0.0], Losses()
    monkeypatch.setattr(losses.time, "monotonic", lambda: now[0])
    for _ in range(3):
        assert found.why_too_many(5) == found.why_too_many(6) == ""
        now[0] += 100
    assert found.why_too_many(5) == "workers were lost 4 times at the same command"
    now[0] += 550  # the three of command 6 are longer ago than ten minutes
    assert found.why_too_many(6) == "" and found.why_too_many(7) == ""
    assert all(found.why_too_many(None) == "" for _ in range(8)), "no command causes the loss of those that wait"
