"""Every host is in the tree once, in rank order, and nobody talks to more hosts than allowed."""

from __future__ import annotations

import pytest

from moreh_ap.runtime.relay.fan_out import branches_of, packed, unpacked


def hosts_of(branches):
    for branch in branches:
        assert branch.num_hosts == 1 + sum(below.num_hosts for below in branch.below)
        assert branch.has(branch.first) and not branch.has(branch.first + branch.num_hosts)
        yield branch.first, branch.address
        yield from hosts_of(branch.below)


def depth_of(branches):
    return 1 + max(map(depth_of, (one.below for one in branches)), default=0) if branches else 0


@pytest.mark.parametrize("fan_out", [1, 2, 4])
@pytest.mark.parametrize("num_hosts", [1, 2, 4, 5, 9, 64])
def test_all_hosts_are_in_the_tree_in_rank_order(num_hosts, fan_out):
    branches = branches_of([(f"host{host}", 1) for host in range(num_hosts)], fan_out)
    assert list(hosts_of(branches)) == [(host, f"host{host}") for host in range(num_hosts)]
    assert len(branches) <= fan_out and all(len(one.below) <= fan_out for one in branches)
    assert [unpacked(packed(one)) for one in branches] == list(branches)


def test_the_tree_is_flat_for_few_hosts_and_shallow_for_many():
    sizes = {num_hosts: depth_of(branches_of([("a", 1)] * num_hosts)) for num_hosts in (4, 8, 64, 512)}
    assert sizes == {4: 1, 8: 2, 64: 3, 512: 5}
