"""Groups of devices, and what a ring passes on."""

from __future__ import annotations

import pytest

from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.collectives import gather_s, group_of, pipeline_messages, queued_sums_s
from moreh_ap.planner.cost.hardware import find_cluster

CLUSTER = find_cluster("64xH100")


def test_groups_inside_and_between_nodes():
    inside = group_of(8, 1, CLUSTER)
    assert (inside.nodes, inside.bytes_per_s) == (1, CLUSTER.intra.bytes_per_s)
    spread = group_of(8, 8, CLUSTER)  # one member in each of 8 nodes, beside the 7 groups of the others
    assert (spread.nodes, spread.bytes_per_s) == (8, CLUSTER.inter.bytes_per_s / 8)
    mixed = group_of(16, 2, CLUSTER)  # four members in each of 4 nodes
    assert (mixed.nodes, mixed.bytes_per_s) == (4, min(CLUSTER.inter.bytes_per_s / 2, CLUSTER.intra.bytes_per_s))


def test_a_ring_passes_all_but_one_part():
    group = group_of(4, 1, CLUSTER)
    assert gather_s(4e9, group) == pytest.approx(group.start_s + 3e9 / group.bytes_per_s)
    assert queued_sums_s(4e9, 1, group) == pytest.approx(group.start_s + group.queued_sum_s + 6e9 / group.bytes_per_s)
    assert gather_s(4e9, group_of(1, 1, CLUSTER)) == 0.0


@pytest.mark.parametrize(
    ("distance", "members", "inside", "across"),
    [(1, 8, 7, 0), (1, 16, 14, 1), (2, 16, 12, 3), (4, 4, 2, 1), (8, 4, 0, 3), (16, 4, 0, 3)],
)
def test_boundaries_of_a_pipeline_between_nodes_are_counted(distance, members, inside, across):
    messages = pipeline_messages(1e8, distance, CLUSTER, COEFFICIENTS, members)
    assert (messages.inside, messages.across) == (inside, across)
    assert messages.across_s == pytest.approx(COEFFICIENTS.message_s + 8e8 / CLUSTER.inter.bytes_per_s)
    assert messages.slowest_s == (messages.across_s if across else messages.inside_s)
