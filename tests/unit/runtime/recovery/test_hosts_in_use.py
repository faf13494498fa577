"""Which hosts can have all workers, and how many of those that wait are used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moreh_ap.hosts.reachability import Speed
from moreh_ap.runtime.recovery.hosts_in_use import fewer_on, joined_by, taken_of, why_fewer_on, why_none_on

A, B, C, D = (
    SimpleNamespace(host=name, name=name, report=SimpleNamespace(gpus=("0", "1")), link=None) for name in "abcd"
)


@pytest.mark.parametrize(
    "hosts, kept_by, num_workers, device_type, why",
    [
        ([A, B], [A, B], 4, "cpu", ""),
        ([A], [A, B], 4, "cpu", ""),
        ([], [A], 2, "cpu", "no host is left"),
        ([A, C], [A, B], 4, "cpu", ""),
        ([C], [A, B], 4, "cpu", "the hosts that keep the copies of what their workers held are lost, too"),
        ([A, D], [A, B, C], 4, "cpu", "the hosts that keep the copies of what their workers held are lost, too"),
        ([C], [], 2, "cpu", ""),
        ([A, B, C], [A, B], 4, "cpu", "4 workers cannot be dealt evenly to 3 hosts"),
        ([A, B], [A], 4, "cuda", ""),
        ([A], [A, B], 4, "cuda", "a has 2 GPUs, for 4 workers"),
    ],
)
def test_hosts_that_can_have_all_workers(hosts, kept_by, num_workers, device_type, why):
    assert (why_none_on(hosts, kept_by) or why_fewer_on(hosts, num_workers, device_type)) == why


@pytest.mark.parametrize(
    "hosts, num_workers, device_type, count",
    [
        ([A, B], 3, "cpu", 2),
        ([A, B], 8, "cuda", 4),
        ([A], 4, "cuda", 2),
        ([A, B, C], 4, "cpu", 3),
        ([A, B], 2, "cpu", 0),
    ],
)
def test_fewer_workers_have_room_on_hosts(hosts, num_workers, device_type, count):
    assert fewer_on(hosts, num_workers, device_type) == count


@pytest.mark.parametrize("num_left, num_workers, count", [(1, 4, 1), (2, 4, 2), (2, 6, 1), (4, 4, 0), (3, 5, 2)])
def test_as_many_of_those_that_wait_are_used_as_workers_can_be_dealt_to(num_left, num_workers, count):
    assert taken_of([C, D], num_left, num_workers) == [C, D][:count]


def test_what_joins():
    assert joined_by([A], [], 2, lambda num_hosts, count: count) == ([A], None)
    assert joined_by([A, B], [C], 4, lambda num_hosts, count: count) == ([A, B], None), "not evenly"
    hosts, joined = joined_by([A], [B], 2, lambda num_hosts, count: 2 * num_hosts)
    assert hosts == [A, B] and joined == ("b joined a: 4 workers on 2 hosts, 2 on 1 before.", 4, ("a", "b"), None)
    links = {"b": Speed(0.1, 5e6), "c": Speed(0.2, 7e6)}
    over = [SimpleNamespace(host=name, name=name, link=link) for name, link in links.items()]
    assert joined_by([A], over, 1, lambda num_hosts, count: num_hosts)[1].between == Speed(0.2, 5e6)
