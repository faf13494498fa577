"""Whether fewer devices than there are would be faster: which numbers are compared, and what decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.planner.cost.hardware import find_cluster
from moreh_ap.planner.profiles.transformer_shape import profile_of
from moreh_ap.planner.search import device_counts
from moreh_ap.planner.search.constraints import Constraints
from moreh_ap.planner.search.device_counts import FEWER_MARGIN, faster_on_fewer, smaller_counts
from moreh_ap.planner.search.plan_search import search
from moreh_ap.planner.search.planning_task import Corrections, Task
from unit.planner.search.samples import SHAPE, with_memory


def task(text="8xT4", batch=2, **changes):
    return replace(Task(profile_of(SHAPE, 64), find_cluster(text), batch, Constraints(kinds=frozenset())), **changes)


def on(whole, count):
    return replace(whole, cluster=replace(whole.cluster, num_devices=count, devices_per_node=count))


def fewer(whole, least=1, asked=None):
    """Returns the number of devices that is faster than all, and its ranking's best."""

    def task_on(count):
        if asked is not None:
            asked.append(count)
        return on(whole, count)

    found = faster_on_fewer(search(whole).best.seconds, whole.cluster.num_devices, whole.global_batch, task_on, least)
    return None if found is None else (found.task.cluster.num_devices, found.best)


def test_divisors_and_one_device_a_row_are_compared():
    assert smaller_counts(8, 3) == (4, 3, 2, 1)
    assert smaller_counts(8, 64) == (4, 2, 1)
    assert smaller_counts(6, 5, least=2) == (5, 3, 2)
    assert smaller_counts(2, 1, least=2) == () == smaller_counts(1, 4)


def test_fewer_win_where_sums_of_gradients_take_longer_than_rows():
    whole = task("8xT4", batch=2)
    count, best = fewer(whole)
    assert count < 8 and best.plan.num_devices == count
    assert best.seconds < search(whole).best.seconds * (1 - FEWER_MARGIN)
    count, best = fewer(whole, least=2)
    assert count >= 2


def test_all_win_where_rows_take_longer_than_sums():
    assert fewer(task("8xH100", batch=64)) is None


def test_fewer_devices_have_to_be_clearly_faster_than_all():
    whole = task("8xT4", batch=2)
    best = search(on(whole, 2)).best
    for all_s, wins in ((best.seconds / (1 - FEWER_MARGIN) * 1.001, True), (best.seconds / (1 - FEWER_MARGIN), False)):
        found = faster_on_fewer(all_s, 2, 2, lambda count: on(whole, 2))
        assert (found is not None) is wins
    assert faster_on_fewer(best.seconds, 8, 2, lambda count: on(whole, 2)) is None, "a tie is no reason"


def test_of_numbers_that_cannot_be_distinguished_the_largest_is_taken():
    whole, asked = task("8xT4", batch=2), []

    def same(count):
        asked.append(count)
        return replace(on(whole, 2), global_batch=100 + count)

    found = faster_on_fewer(1e9, 8, 2, same)
    assert asked == [4, 2, 1] and found.task.global_batch == 104


def test_what_does_not_fit_or_is_not_known_is_not_chosen():
    whole = task("8xT4", batch=2)
    leanest = search(on(whole, 1)).best.memory.reserved_bytes / 2**30
    small = replace(whole, cluster=with_memory(whole.cluster, leanest / 2))
    assert search(small).num_fitting
    found = fewer(small)
    assert found is None or found[0] > 1
    assert faster_on_fewer(1e9, 8, 2, lambda count: None) is None


def test_numbers_that_cannot_be_fast_enough_at_their_peak_are_not_searched(monkeypatch):
    whole, searched = task("8xH100", batch=4096), []
    all_s = search(whole).best.seconds
    monkeypatch.setattr(device_counts, "search", lambda one: searched.append(one.cluster.num_devices) or search(one))
    assert faster_on_fewer(all_s, 8, 4096, lambda count: on(whole, count)) is None
    assert 1 not in searched


@pytest.mark.parametrize("slower", [1.0, 3.0])
def test_what_was_learned_of_a_number_counts(slower):
    """Steps on fewer devices took three times as long as predicted: then all are faster."""
    whole = task("8xT4", batch=8)
    all_s = search(whole).best.seconds
    found = faster_on_fewer(all_s, 8, 8, lambda count: replace(on(whole, count), corrections=Corrections(time=slower)))
    assert (found is not None) is (slower == 1.0)
