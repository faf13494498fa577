"""The total of a step and the rates that follow from it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from moreh_ap.planner.cost.step_estimate import StepEstimate

SECONDS = [field.name for field in fields(StepEstimate) if field.name.endswith("_s")]
STEP = StepEstimate(
    **{name: float(2**place) for place, name in enumerate(SECONDS)},
    tokens=4096.0, num_devices=4, model_flops=1e15, peak_flops=1e12,
)  # fmt: skip


def test_seconds_that_overlap_are_not_in_the_total():
    hidden = [name for name in SECONDS if "hidden" in name]
    assert len(hidden) == 3
    assert STEP.total_s == sum(getattr(STEP, name) for name in SECONDS if name not in hidden)


def test_every_second_is_in_one_component():
    assert sum(seconds for _, seconds, _ in STEP.components) == STEP.total_s
    assert sum(seconds + hidden for _, seconds, hidden in STEP.components) == sum(getattr(STEP, one) for one in SECONDS)
    assert len({label for label, _, _ in STEP.components}) == len(STEP.components)


def test_a_scaled_step_has_the_same_tokens():
    twice = STEP.scaled(2.0)
    assert (twice.total_s, twice.tokens, twice.num_devices) == (2.0 * STEP.total_s, STEP.tokens, STEP.num_devices)
    assert twice.mfu == pytest.approx(STEP.mfu / 2.0)


def test_rates():
    assert STEP.tokens_per_s == pytest.approx(4096.0 / STEP.total_s)
    assert STEP.tokens_per_s_per_device == pytest.approx(STEP.tokens_per_s / 4)
    assert STEP.mfu == pytest.approx(1e15 / (STEP.total_s * 4 * 1e12))
