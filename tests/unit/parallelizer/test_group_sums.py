"""Which workers of a group share a host. What is summed: tests/process/test_parallelizer_gradients.py."""

from __future__ import annotations

import pytest

from moreh_ap.parallelizer.group_sums import workers_by_host


@pytest.mark.parametrize(
    "ranks, per_host, hosts",
    [
        ((0, 1, 2, 3), 2, ((0, 1), (2, 3))),
        ((1, 3), 2, ((1,), (3,))),
        ((0, 1, 2), 4, ((0, 1, 2),)),
        ((1, 3, 5, 7, 9, 11), 4, ((1, 3), (5, 7), (9, 11))),
        ((2, 3, 4), 4, ((2, 3), (4,))),
    ],
)
def test_workers_are_grouped_by_host(ranks, per_host, hosts):
    assert workers_by_host(ranks, per_host) == hosts
