"""Embedding and head as units of their own give the numbers of one process, however a forward uses them."""

from __future__ import annotations

from functools import cache

import outer_layers_jobs as jobs
import pytest
import torch
from parallelizer_team import Team

from moreh_ap.plan import Plan

pytestmark = pytest.mark.rotating  # one more plan or way to use a layer each

STEPS = 4
alone = cache(jobs.alone)
KINDS = {
    "called": [],
    "frozen": [],
    "in place": [],
    "called twice": [],
    "embedding twice": [],
    "not called": [],
    "penalty before": ["head"],
    "penalty after": ["head"],
    "penalty on all": ["embedding", "head"],
    "read alone": ["head"],
    "read between": ["head"],
    "decoded": ["embedding"],
    "later read alone": ["head"],
    "later penalty after": ["head"],
    "later not called": [],
}
PLANS = [
    "shard=2",
    "shard=2,micro_batches=2",
    "replicate=2,shard=2,micro_batches=2",
    "shard=2,recompute=full",
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [*KINDS, "tied"])
def test_numbers_are_those_of_one_process(team: Team, kind: str, plan: str) -> None:
    wanted_losses, wanted_gradients, wanted_weights = alone(kind, STEPS)
    found = team.run(Plan.parse(plan).num_devices, jobs.train, kind=kind, plan=plan, steps=STEPS, least=1)
    losses, gradients, weights, units, joined, evaluated, both = found[0]
    assert units == ([] if kind == "tied" else ["embedding", "head"])
    assert sorted(joined) == KINDS.get(kind, [])
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert evaluated[:-1] != losses[:-1]  # of the weights after each step
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


@pytest.mark.parametrize("kind", ["called", "read alone", "penalty after"])
def test_in_bfloat16_numbers_are_those_without_units(team: Team, kind: str) -> None:
    runs = [
        team.run(2, jobs.train, kind=kind, plan="shard=2,precision=bf16", steps=STEPS, least=least)[0]
        for least in (1, 2**24)
    ]
    (losses, _, weights, units, *_), (without, _, wanted, none, *_) = runs
    assert (units, none) == (["embedding", "head"], [])
    assert losses == pytest.approx(without, rel=1e-6)
    for key, value in wanted.items():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-7, msg=key)
