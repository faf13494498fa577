"""Processes that tests share: a team for the parallelizer's, one accelerator after the other for the one line's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from parallelizer_team import Team

from moreh_ap import device
from moreh_ap.option import Options
from moreh_ap.plan import Plan
from moreh_ap.session.session import Session


@pytest.fixture(scope="module")
def accelerator() -> Iterator[Callable[[str], Session]]:
    """``accelerator(plan)`` enables the one line with that plan and returns its session.

    Workers are kept while the number of devices stays the same: a plan is chosen at a model's first call, so later
    tests only change the session's options.
    """

    def enable(plan: str, **options: object) -> Session:
        wanted = Options(plan=Plan.parse(plan), devices=Plan.parse(plan).num_devices, mixed_precision=False)
        wanted = replace(wanted, **options)  # type: ignore[arg-type]
        current = device.current()
        if current is None or current.session.num_devices != wanted.devices:
            device.disable()
            device.enable(wanted)
            current = device.current()
        assert current is not None
        current.options = current.session.options = wanted
        return current.session

    yield enable
    device.disable()


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Processes for `team.run(world, job, ...)`."""
    team = Team()
    yield team
    team.close()
