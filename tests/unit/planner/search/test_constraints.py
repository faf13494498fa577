"""What the options leave of all plans, and values that are refused."""

from __future__ import annotations

import pytest

from moreh_ap.errors import OptionError
from moreh_ap.option import Options
from moreh_ap.planner.search.constraints import Constraints


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
