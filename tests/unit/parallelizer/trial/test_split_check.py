"""Verdicts on forwards that go several ways."""

from __future__ import annotations

from dataclasses import replace

from moreh_ap.parallelizer.row_dims.row_steps import Step
from moreh_ap.parallelizer.trial.split_check import SplitVerdict

FIRST, SECOND = Step("exp", site=1), Step("sin", site=2)
VERDICT = SplitVerdict(True, ("rows",), "", steps=(FIRST,))


def test_ways_that_differ_in_steps_alone_are_joined():
    both = replace(VERDICT, steps=(SECOND,)).joined_with(VERDICT)
    assert set(both.steps) == {FIRST, SECOND} and not both.in_order
    third = replace(VERDICT, steps=(Step("cos", site=3),)).joined_with(both)
    assert len(third.steps) == 3


def test_ways_that_give_other_results_are_not():
    for other in (replace(VERDICT, kinds=("same",)), replace(VERDICT, steps=(replace(FIRST, gathers=True),))):
        assert VERDICT.joined_with(other) is VERDICT
