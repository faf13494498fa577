"""Marks tests by the folder they are in, hides GPUs from them, and deals files to lanes.

Of the tests marked `rotating`, which repeat a case for one more model, script, plan or way to end, CI runs one part of
eight, the next one every day. ``MOREH_CI_PART=2`` runs the second part; without the variable all of them run.
"""

from __future__ import annotations

import os
import signal
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ONE_LANE = ("tests/site/", "tests/process/test_several_hosts")
"""How the paths of files begin that share a fixture which is expensive to make: one process of pytest runs them all."""

NUM_PARTS = 8
"""Of the tests marked `rotating`."""

NUM_FILES = 30
"""Of which the summary of `make test` tells the seconds."""

# All tests have CPU workers wherever they run, as continuous integration does. Only the processes that tests in
# `tests/gpu` start see the GPUs that could be seen before; "all" is for a variable that was not set.
os.environ.setdefault("MOREH_TEST_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell starts what it runs in the background with Ctrl-C ignored, and so would be the scripts of tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def machine_cache() -> Iterator[None]:
    """What sessions remember of this machine, in a folder of this run's, shared by all tests."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOREH_AP_CACHE", os.environ.get("MOREH_AP_CACHE", folder))
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test in `tests/process` and `tests/gpu` the mark of its folder; runs quick folders first."""
    part = os.environ.get("MOREH_CI_PART", "")
    if part:
        rotating = [item for item in items if item.get_closest_marker("rotating")]
        others = {item for item, of in zip(rotating, _parts(rotating), strict=True) if of != int(part)}
        items[:] = [item for item in items if item not in others]
        config.hook.pytest_deselected(items=list(others))
    order = {"unit": 0, "process": 1, "gpu": 2, "site": 3}  # a browser's driver keeps an event loop running
    folders = {item: item.path.relative_to(TESTS).parts[0] for item in items if item.path.is_relative_to(TESTS)}
    for item, folder in folders.items():
        if folder in ("process", "gpu"):
            item.add_marker(folder)
    items.sort(key=lambda item: order.get(folders.get(item, ""), len(order)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints why tests failed that `--reruns` ran once more: those that passed then have no other trace."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"RERUN {report.nodeid}", "-")
        terminalreporter.write_line(report.longreprtext)
    if terminalreporter.config.getoption("durations"):
        _print_seconds(terminalreporter)


def _print_seconds(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints where the time went: the seconds of the costliest files, and of each lane, with what it idled."""
    reports = [one for some in terminalreporter.stats.values() for one in some if isinstance(one, pytest.TestReport)]
    files, tests, lanes, ends = Counter[str](), Counter[str](), Counter[str](), dict[str, float]()
    for report in reports:
        file, lane = report.nodeid.split("::")[0], getattr(report, "worker_id", "one")
        files[file] += report.duration
        tests[file] += report.when == "call"
        lanes[lane] += report.duration
        ends[lane] = max(ends.get(lane, 0.0), report.stop)
    terminalreporter.section(f"seconds per file, {sum(files.values()):.0f} in all")
    for file, seconds in files.most_common(NUM_FILES):
        terminalreporter.write_line(f"{seconds:7.1f} s  {tests[file]:4} tests  {file}")
    for lane in sorted(lanes):
        idle_s = max(ends.values()) - ends[lane]
        terminalreporter.write_line(f"{lanes[lane]:7.1f} s in lane {lane}, which ended {idle_s:.0f} s before the last")


def _parts(items: list[pytest.Item]) -> Iterator[int]:
    """The part from 1 to `NUM_PARTS` in which each rotating test runs, the same on every machine.

    The tests of a file are dealt in turn, each file from a place of its own, so that every part has some of each.
    """
    dealt: Counter[Path] = Counter()
    for item in items:
        yield 1 + (zlib.crc32(item.path.name.encode()) + dealt[item.path]) % NUM_PARTS
        dealt[item.path] += 1


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, where it is installed
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Deals whole files to the processes of `pytest -n`, in the order in which they are collected.

    A file's tests share worker processes, so one process of pytest runs them all.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return next((start for start in ONE_LANE if file.startswith(start)), file)

    config.option.loadscopereorder = False
    return Lanes(config, log)
