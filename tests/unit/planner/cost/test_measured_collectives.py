"""Figures that were measured on a machine, and what lies between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap.plan import Plan
from moreh_ap.planner.cost.coefficients import COEFFICIENTS
from moreh_ap.planner.cost.collectives import (
    PipelineMessages,
    group_of,
    pipeline_messages,
    queued_gathers_s,
    queued_sums_s,
)
from moreh_ap.planner.cost.hardware import Cluster, Link
from moreh_ap.planner.cost.measured_collectives import MeasuredCollective, nearest, rate_at
from moreh_ap.planner.cost.step_time import estimate_step
from unit.planner.cost.samples import DEVICE, RING, SYSTEM, TINY, step

POINTS = ((1e3, 1e-3), (1e6, 2e-3))


def link(**seconds: float) -> Link:
    """Returns a link on which each kind of exchange takes so long whatever its bytes, for pairs and fours."""
    kinds = ("sum", "gather", "scatter", "message", "crossing_sum", "crossing_split")
    taken = dict.fromkeys(kinds, 1e-6) | seconds
    points = {kind: ((1.0, each), (1e9, each)) for kind, each in taken.items()}
    measured = tuple(MeasuredCollective(kind, size, points[kind]) for kind in kinds for size in (2, 4))
    return replace(RING, measured=measured)


def test_between_measured_sizes_seconds_are_on_a_line_and_never_fall():
    exchange = MeasuredCollective("sum", 2, (*POINTS, (2e6, 1.5e-3), (3e6, 4.5e-3)))
    assert exchange.takes_s(1.0) == 1e-3
    assert exchange.takes_s(500_500) == pytest.approx(1.5e-3)
    assert exchange.takes_s(1.5e6) == 2e-3, "noise does not make more bytes faster than fewer"
    assert exchange.takes_s(4e6) == pytest.approx(7.5e-3)
    assert MeasuredCollective("sum", 2, POINTS[:1]).takes_s(1e9) == 1e-3


def test_rates_change_evenly_with_every_doubling():
    rates = ((1e6, 8e9), (4e6, 2e9), (1e8, 1e9))
    assert [rate_at(rates, amount) for amount in (1.0, 1e6, 4e6, 1e9)] == [8e9, 8e9, 2e9, 1e9]
    assert rate_at(rates, 2e6) == pytest.approx(4e9)
    assert rate_at(rates[:1], 5e6) == 8e9


def test_the_nearest_number_of_members_stands_for_others():
    kinds = [("sum", 2), ("sum", 8), ("gather", 4)]
    found = [MeasuredCollective(kind, members, POINTS) for kind, members in kinds]
    assert [nearest(found, "sum", members).members for members in (2, 3, 5, 16)] == [2, 2, 8, 8]
    assert nearest(found, "scatter", 2) is None


def test_measured_kinds_take_what_they_took_and_pieces_add_up():
    cluster = Cluster(DEVICE, 4, 4, *[link(sum=3.0, gather=5.0, scatter=7.0, message=11.0)] * 2)
    group = group_of(4, 1, cluster)
    assert queued_sums_s(1e6, 2, group) == 6.0
    assert queued_gathers_s(1e6, 3, group) == 15.0
    assert queued_gathers_s(1e6, 1, group, "scatter") == 7.0
    assert pipeline_messages(1e6, 1, cluster, COEFFICIENTS, 4) == PipelineMessages(3, 11.0, 0, 11.0)
    plain = Cluster(DEVICE, 4, 4, RING, RING)
    assert queued_gathers_s(1e6, 3, group_of(4, 1, plain), "scatter") == queued_gathers_s(1e6, 3, group_of(4, 1, plain))


@pytest.mark.parametrize(
    ("plan", "kind", "times"),
    [
        ("replicate=2", "sum", 8 + 2 + TINY.parameters / COEFFICIENTS.bucket_parameters),
        ("shard=2", "gather", 2 * (8 + 2)),
        ("shard=2", "scatter", 8 + 2),
        ("tensor=2", "crossing_sum", (2 * 8 * 2 + 2) / 2),
        ("tensor=2,sequence_parallel=true", "crossing_split", (2 * 8 * 2 + 2) / 2),
        ("pipeline=2,micro_batches=4", "message", 2 * 4 + 2),
    ],
)
def test_each_kind_of_plan_pays_for_the_exchanges_that_it_has(plan, kind, times):
    difference = step(plan, link(**{kind: 2e-6})).total_s - step(plan, link()).total_s
    assert difference == pytest.approx(times * 1e-6, rel=1e-6)
    others = {"sum", "gather", "scatter", "crossing_sum", "crossing_split", "message"} - {kind}
    others -= {"gather", "scatter"} if plan == "shard=2" else set()
    assert step(plan, link(**dict.fromkeys(others, 1.0))).total_s == pytest.approx(step(plan, link()).total_s)


def test_workers_that_wait_leave_their_cores_to_the_others():
    alone, shared = (step("pipeline=4,micro_batches=4", device=replace(DEVICE, sharing=part)) for part in (1.0, 2.0))
    assert alone.bubble_s > 0.5 * alone.forward_s and shared.bubble_s < 0.5 * alone.bubble_s
    one_at_a_time = step("pipeline=4,micro_batches=1,schedule=gpipe", device=replace(DEVICE, sharing=2.0))
    assert one_at_a_time.bubble_s > 0.0, "one of four computes, and has a whole core"
    four = step("pipeline=4,micro_batches=1,schedule=gpipe", device=replace(DEVICE, sharing=4.0))
    assert four.bubble_s < 0.05 * one_at_a_time.bubble_s, "one core for all: nothing waits"
    assert step("replicate=4", device=replace(DEVICE, sharing=2.0)) == step("replicate=4")


def test_a_pipeline_over_two_hosts_waits_for_messages_between_them():
    def total_s(slow, plan, device=DEVICE):
        cluster = Cluster(device, 4, 2, link(message=1e-6), link(message=slow))
        return estimate_step(TINY, Plan.parse(plan), 16, cluster, SYSTEM).total_s

    plan = "pipeline=4,micro_batches=4"
    for device in (DEVICE, replace(DEVICE, sharing=4.0)):
        waits_s = total_s(1.0, plan, device) - total_s(1e-6, plan, device)
        assert 9.5 < waits_s <= 10.0, "2 for each of 4 micro-batches and 2 to fill it, of which sharing hides a part"
    assert total_s(1.0, "pipeline=2,micro_batches=4") == total_s(1e-6, "pipeline=2,micro_batches=4"), "one host"
