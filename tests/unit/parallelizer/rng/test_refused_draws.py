"""Random numbers that may not be drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moreh_ap.parallelizer.loss.diverged import Diverged
from moreh_ap.parallelizer.rng.refused_draws import RefusedDraws


@pytest.mark.parametrize("draw", [lambda: torch.rand(2), lambda: F.dropout(torch.ones(2)), lambda: torch.randperm(3)])
def test_draws_are_refused_for_a_time(draw):
    with pytest.raises(Diverged, match="the forward draws"), RefusedDraws():
        draw()
    draw()


def test_dropout_that_drops_nothing_draws_nothing():
    with RefusedDraws():
        assert F.dropout(torch.ones(2), training=False).tolist() == [1, 1]
