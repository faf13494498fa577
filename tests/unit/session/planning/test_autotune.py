"""Which plans are tried, and when compiled blocks are kept."""

import pytest

from moreh_ap.session.planning.autotune import StepTimes, compiling_pays, plans_to_try
from unit.session.planning.samples import candidate


def test_plans_that_are_tried_differ_in_their_axes_first():
    names = [
        "tensor=2,micro_batches=2", "tensor=2", "replicate=2", "replicate=2,recompute=full", "shard=2",
        "pipeline=2,micro_batches=4",
    ]  # fmt: skip
    ranked = [candidate(name) for name in names]
    assert [str(one.plan) for one in plans_to_try(ranked, 3)] == [str(ranked[i].plan) for i in (0, 2, 4)]
    assert [str(one.plan) for one in plans_to_try(ranked[:4], 3)] == [str(ranked[i].plan) for i in (0, 1, 2)]
    assert plans_to_try([], 3) == []


@pytest.mark.parametrize(
    ("compiled", "pays"),
    [
        (StepTimes(30.0, 0.8, 0.0), True),
        (StepTimes(30.0, 0.96, 0.0), False),  # may be chance
        (StepTimes(199.0, 0.8, 0.0), True),
        (StepTimes(205.0, 0.8, 0.0), False),  # not repaid within a thousand steps
        (StepTimes(30.0, 1.3, 0.0), False),
        (StepTimes(1.0, 1.0, 0.0), False),  # runs as written
    ],
)
def test_compiled_blocks_are_kept_if_they_pay(compiled, pays):
    assert compiling_pays(StepTimes(2.0, 1.0, 0.0), compiled) is pays
