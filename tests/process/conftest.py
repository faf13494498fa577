"""Processes that tests share: a team for the parallelizer's, one accelerator after the other for the one line's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drop_in_runs import BothInTurn
from hosts_lab import Lab
from parallelizer_team import Team
from user_script import UserScript

from moreh_ap import device
from moreh_ap.accelerator.enabling import enable as enable_accelerator
from moreh_ap.errors import PlanError
from moreh_ap.plan import Plan
from moreh_ap.session.session import Session
from moreh_ap.settings import Options

HERE = Path(__file__).parent
USUAL_DEVICES = 2
NEXT_USES_ACCELERATOR = pytest.StashKey[bool]()
SLOW_SCRIPTS = (
    "test_storm.py",
    "test_one_line_endings.py",
    "test_manual_scripts.py",
    "test_tutorials.py",
    "test_drop_in_lm.py",
    "test_several_hosts.py",
    "test_recovery.py",
    "test_automatic_checkpoints.py",
    "test_resumed_runs.py",
    "test_leaner_plan.py",
    "test_step_counts.py",
)
"""Files without `accelerator` that take longest, the longest first, so that no lane begins one of them at the end.

Those with many workers of their own are apart, so that two lanes hardly run them at the same time.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests of this folder so that workers start seldom.

    Files with tests that use `accelerator` follow each other; in a file, tests that need as many workers do. Of the
    other files, the slowest come first.
    """
    places = [place for place, item in enumerate(items) if item.path.is_relative_to(HERE)]
    tests = [items[place] for place in places]
    files = list(dict.fromkeys(item.path for item in tests))
    users = {item.path for item in tests if _uses_accelerator(item)}
    devices = {item: _num_devices(item) for item in tests}
    slow = {name: place for place, name in enumerate(SLOW_SCRIPTS)}
    tests.sort(
        key=lambda item: (
            item.path not in users,
            slow.get(item.path.name, len(slow)),
            files.index(item.path),
            devices[item] != USUAL_DEVICES,
            devices[item],
        )
    )
    for place, item in zip(places, tests, strict=True):
        items[place] = item


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tells the fixture `accelerator` whether the next test of this process will use it too."""
    item.session.stash[NEXT_USES_ACCELERATOR] = nextitem is not None and _uses_accelerator(nextitem)


def _uses_accelerator(item: pytest.Item) -> bool:
    return "accelerator" in getattr(item, "fixturenames", ())


def _num_devices(item: pytest.Item) -> int:
    """How many devices the plan has that is a parameter of `item`, if one is."""
    if _uses_accelerator(item) and hasattr(item, "callspec"):
        for value in item.callspec.params.values():
            with contextlib.suppress(PlanError):
                return Plan.parse(str(getattr(value, "text", value))).num_devices
    return USUAL_DEVICES


@pytest.fixture(scope="module")
def accelerator(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Session]]:
    """``accelerator(plan)`` enables the one line with that plan and returns its session.

    Workers are kept while the number of devices stays the same, also for the next file if its first test uses them: a
    plan is chosen at a model's first call, so later tests only change the session's options.
    """

    def enable(plan: str, **options: object) -> Session:
        wanted = Options(plan=Plan.parse(plan), devices=Plan.parse(plan).num_devices, mixed_precision=False)
        wanted = replace(wanted, **options)  # type: ignore[arg-type]
        current = device.current()
        if current is None or current.session.num_devices != wanted.devices:
            device.disable()
            enable_accelerator(wanted)
            current = device.current()
        assert current is not None
        current.options = current.session.options = wanted
        return current.session

    yield enable
    if not request.session.stash[NEXT_USES_ACCELERATOR]:
        device.disable()


@pytest.fixture(scope="session")
def team() -> Iterator[Team]:
    """Processes for `team.run(world, job, ...)`."""
    team = Team()
    yield team
    team.close()


@pytest.fixture(scope="module")
def both_in_turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BothInTurn]:
    """``both_in_turn(script, folder)``: what a script prints with and without the one line."""
    both = BothInTurn(tmp_path_factory.mktemp("in-turn"))
    yield both
    both.close()


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two hosts, as network namespaces; see `hosts_lab.py`."""
    made = Lab()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What one process computes with `scripts/several_hosts.py`: losses and weights."""
    results = tmp_path_factory.mktemp("alone") / "results"
    with UserScript("several_hosts.py", results, "nothing", cwd=results.parent) as script:
        script.succeed()
    return torch.load(results)[""]
