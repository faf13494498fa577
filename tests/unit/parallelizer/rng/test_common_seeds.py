"""Seeds that a forward takes from the system."""

from __future__ import annotations

import torch

from moreh_ap.parallelizer.rng import common_seeds


def test_workers_whose_streams_are_in_one_place_take_one_seed():
    torch.manual_seed(3)
    first, drawn = common_seeds.seed(), torch.rand(2)
    torch.manual_seed(3)
    assert common_seeds.seed() == first and torch.equal(torch.rand(2), drawn)
    assert common_seeds.seed() != first
    assert common_seeds.TAKEN.count(first) == 2
    common_seeds.TAKEN.clear()
