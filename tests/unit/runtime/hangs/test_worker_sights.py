"""For how long processes are stopped or compute nothing."""

from __future__ import annotations

import pytest

from moreh_ap.runtime.hangs import worker_sights
from moreh_ap.runtime.hangs.process_looks import Look
from moreh_ap.runtime.hangs.worker_sights import QUIET_S, Sight, WorkerClocks


@pytest.fixture
def seen(monkeypatch) -> dict[int, Look]:
    """What the kernel says of process 7; every look is 5 s after the one before."""
    found, now_s = {7: Look("S", 1.0)}, iter(range(0, 10_000, 5))
    monkeypatch.setattr(worker_sights, "look_at", found.get)
    monkeypatch.setattr(worker_sights.time, "monotonic", lambda: float(next(now_s)))
    return found


def looks(clocks: WorkerClocks, count: int) -> Sight:
    """Returns what is seen at the last of some looks."""
    for _ in range(count):
        found = clocks.look({3: 7})
    return found[3]


def test_a_process_is_quiet_from_the_first_look_on_until_it_computes(seen):
    clocks = WorkerClocks(5.0)
    assert looks(clocks, 1) == Sight(False, 0.0, 0.0)
    assert looks(clocks, 2) == Sight(False, 0.0, 10.0)
    seen[7] = Look("R", 1.0 + 0.9 * QUIET_S)
    assert looks(clocks, 1).quiet_s == 15.0
    seen[7] = Look("S", 1.0 + QUIET_S)
    assert looks(clocks, 1).quiet_s == 0.0
    assert looks(clocks, 1).quiet_s == 5.0, "from here on"


def test_a_stopped_process_is_stopped_since_it_was_seen_so_and_is_not_quiet(seen):
    clocks = WorkerClocks(5.0)
    looks(clocks, 3)
    seen[7] = Look("T", 1.0)
    assert looks(clocks, 1) == Sight(False, 0.0, 0.0)
    assert looks(clocks, 2) == Sight(False, 10.0, 0.0)
    seen[7] = Look("S", 1.0)
    assert looks(clocks, 1) == Sight(False, 0.0, 5.0)
    seen[7] = Look("t", 1.0)
    assert looks(clocks, 1) == Sight(True, 0.0, 0.0)


def test_another_process_begins_anew_and_of_one_that_is_gone_nothing_is_known(seen):
    clocks = WorkerClocks(5.0)
    looks(clocks, 3)
    seen[8] = Look("S", 1.0)
    assert clocks.look({3: 8}) == {3: Sight(False, 0.0, 0.0)}
    del seen[8]
    assert clocks.look({3: 8}) == {}


def test_time_without_looks_does_not_count(seen, monkeypatch):
    clocks = WorkerClocks(5.0)
    looks(clocks, 2)
    monkeypatch.setattr(worker_sights.time, "monotonic", lambda: 100_000.0)
    assert looks(clocks, 1).quiet_s == 5.0 + 2 * 5.0
