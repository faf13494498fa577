"""Trainings on GPUs give what one GPU gives without the one line: every plan on one GPU, on a shared one, on several.

On a machine without a GPU the same runs with CPU workers, so that the tests themselves are known to work.
"""

from __future__ import annotations

import pytest
import torch
from gpu_cases import PLACES, Case
from gpu_runs import num_gpus, why_not

EVERY_DAY = ("llama: replicate=1", "llama: replicate=2", "llama: shard=2")
"""What CI runs each day; of the others a few (`rotating`)."""


def parameter(place: str, case: Case) -> object:
    """Returns the parameters of a test; cases of four workers, which are one more start, take their turn together."""
    is_daily = case.name in EVERY_DAY or PLACES[place][0] == 4
    return pytest.param(place, case, id=f"{place}-{case.name}", marks=() if is_daily else pytest.mark.rotating)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("place", "case"), [parameter(place, one) for place in PLACES for one in PLACES[place][1]])
def test_a_training_is_that_of_one_device(place, case, results):
    if reason := why_not(place):
        pytest.skip(reason)
    expected, found = results("reference").get(f"{case.training}: reference"), results(place)
    got = found.get(case.name)
    assert expected is not None and "losses" in expected, results("reference")[""]["output"]
    assert got is not None, found[""]["output"]
    assert "error" not in got, got["error"]
    assert got["workers"] == ("cuda" if num_gpus() else "cpu"), "the workers have the devices"
    for what in ("losses", "weights"):
        wanted, actual = (torch.tensor(one[what]) for one in (expected, got))
        difference, largest = (float(x.abs().max()) if x.numel() else 0.0 for x in (actual - wanted, wanted))
        assert difference <= case.tolerance * largest, f"{what} differ by {difference:.2g} of {largest:.2g}"
