"""Forwards that use parts of blocks themselves give the numbers of one process under plans that shard."""

from __future__ import annotations

from functools import cache

import opened_blocks_jobs as jobs
import pytest
import torch
from parallelizer_team import Team
from rotating import rotating_from

from moreh_ap.plan import Plan

STEPS = 4
ALL = list(range(jobs.NUM_BLOCKS))
KINDS = {
    "called": [],
    "parts": ALL,
    "one": [1],
    "forward": ALL,
    "called and opened": ALL,
    "another's": ALL,
    "weight": [0],
    "penalty": [1],
    "checkpoint": ALL,
    "checkpoint reentrant": ALL,
    "evaluation": ALL,
    "later parts": ALL,
    "later weight": [0],
    "frozen around": ALL,
    "nothing around": ALL,
}
PLANS = ["shard=2,micro_batches=2", "replicate=2,shard=2,micro_batches=2", "shard=2,recompute=full"]
alone = cache(jobs.alone)


@pytest.mark.parametrize("kind", rotating_from(2, KINDS))
def test_numbers_are_those_of_one_process(team: Team, kind: str) -> None:
    compare(team, kind, "shard=2")


@pytest.mark.rotating
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_one_process_under_other_plans(team: Team, kind: str, plan: str) -> None:
    compare(team, kind, plan)


def compare(team: Team, kind: str, plan: str) -> None:
    wanted_losses, wanted_gradients, wanted_weights = alone(kind, STEPS)
    found = team.run(Plan.parse(plan).num_devices, jobs.train, kind=kind, plan=plan, steps=STEPS)
    losses, gradients, weights, joined, gathered, both, is_split = found[0]
    assert is_split
    assert joined == KINDS[kind]
    assert gathered == [0] * STEPS
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    for key, wanted in wanted_gradients.items():
        assert (gradients[key] is None) == (wanted is None), key
        if wanted is not None:
            torch.testing.assert_close(gradients[key], wanted, rtol=1e-4, atol=1e-7, msg=key)
    for key, wanted in wanted_weights.items():
        torch.testing.assert_close(weights[key], wanted, rtol=1e-4, atol=1e-6, msg=key)
    model = jobs.make(kind)
    model.load_state_dict(weights, strict=False)
    for step in (STEPS, STEPS + 1):
        model(**jobs.batch(step))[0].backward()
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(both[key], parameter.grad, rtol=1e-4, atol=1e-7, msg=key)
