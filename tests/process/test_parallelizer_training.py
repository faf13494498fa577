"""Training under every plan gives the losses and weights of one process."""

from __future__ import annotations

from functools import cache

import parallelizer_jobs as jobs
import pytest
import torch
from parallelizer_models import train_alone
from parallelizer_team import Team

pytestmark = pytest.mark.rotating  # one more family or plan each

STEPS = 20
PLANS = [
    "replicate=1",
    "replicate=1,micro_batches=2",
    "replicate=2",
    "shard=2",
    "replicate=2,micro_batches=2",
    "shard=2,micro_batches=2",
    "replicate=3",
    "shard=3",
    "replicate=4",
    "shard=4",
    "replicate=2,shard=2",
    "replicate=2,shard=2,micro_batches=2",
]
one_process = cache(train_alone)


def largest_relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to the largest entry: entries that pass through zero have no relative error of their own."""
    return ((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12)).item()


def size_of(plan: str) -> int:
    return jobs.Plan.parse(plan).num_devices


CASES = [
    *((name, plan) for name in ("classifier", "gpt2", "llama") for plan in PLANS),
    ("branching", "replicate=2,micro_batches=2"),
    ("branching", "shard=2,micro_batches=2"),
    *(("routed", plan) for plan in ("shard=2,micro_batches=2", "shard=2,micro_batches=3")),
    *(("dividing", plan) for plan in ("replicate=2", "shard=2", "replicate=2,micro_batches=2", "replicate=3")),
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_losses_and_weights_are_those_of_one_process(team: Team, name: str, plan: str) -> None:
    wanted_losses, wanted_weights = one_process(name, STEPS)
    results = team.run(size_of(plan), jobs.train, name=name, plan=plan, steps=STEPS)
    mode, reason, losses, weights = results[0]
    assert (mode, reason) == ("split", "")
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    errors = {key: largest_relative_error(weights[key], value) for key, value in wanted_weights.items()}
    assert max(errors.values()) < 1e-4, errors
    assert all(result[2] == losses for result in results)


@pytest.mark.parametrize("plan", ["replicate=3", "shard=3"])
def test_fewer_rows_than_workers_run_whole(team: Team, plan: str) -> None:
    wanted_losses, _ = one_process("gpt2", 5, 2)
    mode, _, losses, _ = team.run(3, jobs.train, name="gpt2", plan=plan, steps=5, rows=2)[0]
    assert mode == "unsplit"
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
