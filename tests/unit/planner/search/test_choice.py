"""The plan that a session uses: the best of the search, or the forced one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moreh_ap import log
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from unit.planner.search.samples import BILLION, choose


def test_the_best_of_the_search_is_chosen():
    choice = choose()
    assert choice.chosen is choice.candidates[0]
    assert choice.chosen.fits
    assert "plans fit in" in log.reason(choice) and "a step" in log.reason(choice)


EVERY_KIND = [
    "tensor=2,sequence_parallel=true,pipeline=2,schedule=zero_bubble",
    "pipeline=4,micro_batches=8,schedule=gpipe,recompute=full",
    "pipeline=2,schedule=interleaved,layers=5+7+7+5,replicate=2",
    "shard=2,tensor=2,recompute=3,offload=optimizer",
]


@pytest.mark.parametrize("text", EVERY_KIND)
def test_every_kind_of_plan_may_be_forced(text):
    choice = choose("4xH100", batch=8, forced=text)
    assert (str(choice.plan), len(choice.candidates)) == (str(Plan.parse(text)), 1)
    assert log.reason(choice).startswith("it was asked for") and "does not fit" not in log.reason(choice)
    assert log.search_lines(choice)[-1] == choice.plan.platform_line(8)


def test_a_forced_plan_that_does_not_fit_is_taken_and_said_so():
    choice = choose("4xL4", forced="replicate=4", shape=replace(BILLION, num_layers=96))
    assert choice.plan == Plan(4)
    assert "by our estimate it does not fit" in log.reason(choice)


def test_a_forced_plan_for_other_devices_is_refused():
    with pytest.raises(PlanError, match="needs 4 devices, the accelerator has 2"):
        choose("2xH100", forced="shard=4")


def test_unverified_kinds_only_where_nothing_fits_without():
    unverified = {"kinds": frozenset(), "distribute_parameter": False, "offload": False}
    assert choose("2xH100", **unverified).plan.pipeline == choose("2xH100", **unverified).plan.tensor == 1
    large = replace(BILLION, num_layers=96)
    chosen = choose("2xA100-80GB", shape=large, **unverified).plan
    assert chosen.tensor * chosen.pipeline == 2
    with pytest.raises(PlanError, match="out of memory"):
        choose("2xL4", shape=large, **unverified)
