"""Values that a plan may not have."""

from __future__ import annotations

import itertools
import re

import pytest

from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan


def test_micro_batches_that_a_schedule_runs():
    """The rule for rounds is PyTorch's own: what it refuses is refused here, and what is named there works."""
    for pipeline, count in itertools.product(range(2, 7), range(1, 40)):
        rounds = max(1, count // pipeline)
        text = f"pipeline={pipeline},schedule=interleaved,micro_batches={count}"
        if count % rounds == 0:
            assert Plan.parse(text).micro_batches == count
            continue
        with pytest.raises(PlanError) as caught:
            Plan.parse(text)
        for number in re.findall(r"\d+", caught.value.allowed.split(",")[0]):
            assert Plan.parse(f"pipeline={pipeline},schedule=interleaved,micro_batches={number}")


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "2"])
@pytest.mark.parametrize("name", ["replicate", "shard", "tensor", "pipeline", "micro_batches", "stages_per_device"])
def test_sizes_that_are_none(name, size):
    with pytest.raises(PlanError, match=f"{name}="):
        Plan(**{name: size})


@pytest.mark.parametrize(
    "values",
    [{"recompute": True}, {"recompute": 1.5}, {"layers": "3+5"}, {"layers": (True, 1)}, {"sequence_parallel": 1}],
)
def test_values_of_a_wrong_type(values):
    with pytest.raises(PlanError, match=next(iter(values))):
        Plan(pipeline=2, tensor=2, **values)
