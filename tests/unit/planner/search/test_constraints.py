"""What the options leave of all plans, and values that are refused."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError, PlanError
from moreh_ap.option import Options
from moreh_ap.plan import Plan
from moreh_ap.planner.search.constraints import Constraints, for_packed_weights


def test_constraints_are_those_of_the_options():
    changed = {
        "pipeline_parallel": False,
        "num_stages": 3,
        "num_micro_batches": 4,
        "activation_recomputation": True,
        "distribute_parameter": False,
        "mixed_precision": False,
        "memory_usage_correction_ratio": 55,
    }
    taken = Constraints.from_options(Options(**changed), frozenset({"tensor"}), (1, 2))
    assert {name: getattr(taken, name) for name in changed} == changed
    assert (taken.kinds, taken.tensor_degrees) == ({"tensor"}, (1, 2))
    assert Constraints.from_options(Options()) == Constraints(memory_usage_correction_ratio=80)


@pytest.mark.parametrize(
    "settings",
    [{"kinds": frozenset({"expert"})}, {"memory_usage_correction_ratio": 101}, {"num_stages": 0}],
)
def test_impossible_constraints(settings):
    with pytest.raises(OptionError):
        Constraints(**settings)


@pytest.mark.parametrize(
    "text, what",
    [("tensor=2", "a tensor axis"), ("pipeline=2,micro_batches=2", "a pipeline"), ("shard=2,precision=bf16", "bf16")],
)
def test_plans_that_would_take_packed_weights_apart_are_refused(text, what):
    with pytest.raises(PlanError, match=what) as caught:
        for_packed_weights(Constraints(), Plan.parse(text))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4 and text in lines[0] and "replicate and shard" in lines[1] and 'plan="shard=2"' in lines[2]


@pytest.mark.parametrize("text", ["replicate=2", "shard=2", "replicate=2,shard=2,micro_batches=2,recompute=full"])
def test_other_plans_for_packed_weights_are_searched_without_a_tensor_axis_a_pipeline_and_bfloat16(text):
    for given in (None, Plan.parse(text)):
        left = for_packed_weights(Constraints(), given)
        assert not left.pipeline_parallel and left.tensor_degrees == (1,) and not left.mixed_precision
