"""A forward is split into batch slices only if rows do not depend on each other."""

from __future__ import annotations

import parallelizer_jobs as jobs
import pytest
from parallelizer_odd_models import REFUSED, BatchNormalised, Splittable
from parallelizer_team import Team
from rotating import rotating_from
from torch import nn


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2"]))
@pytest.mark.parametrize("model_class", REFUSED)
def test_coupled_rows_are_refused(team: Team, model_class: type[nn.Module], plan: str) -> None:
    for verdict, _, changed, with_grad, random_kept in team.run(
        2, jobs.run_split_check, model_class=model_class, plan=plan
    ):
        assert not verdict.split
        assert verdict.reason
        assert (changed, len(with_grad), random_kept) == ([], 1, True)


def test_batch_normalisation_may_be_cut_in_evaluation(team: Team) -> None:
    verdict = team.run(1, jobs.run_split_check, model_class=BatchNormalised, plan="replicate=1", training=False)[0][0]
    assert (verdict.split, verdict.kinds) == (True, ("share",))


@pytest.mark.parametrize("plan", rotating_from(1, ["replicate=2", "shard=2", "replicate=2,shard=2"]))
def test_kinds_of_a_forward_that_may_be_cut(team: Team, plan: str) -> None:
    size = jobs.Plan.parse(plan).num_devices
    for verdict, printed, changed, with_grad, random_kept in team.run(
        size, jobs.run_split_check, model_class=Splittable, plan=plan
    ):
        assert (verdict.split, verdict.reason) == (True, "")
        assert verdict.kinds == ("share", "rows", "same", "const")
        assert (printed, changed, len(with_grad), random_kept) == ("", [], 1, True)
