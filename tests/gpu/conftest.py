"""What tests on GPUs share, and the table at the end of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_runs import Results, num_gpus, results_of, why_not


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """``results(place)``: see `results_of`; what the tests of this run ask for, and no more."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    asked: dict[str, dict[str, None]] = {"reference": {}}
    for item in request.session.items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if "case" in parameters and "place" in parameters and not why_not(parameters["place"]):
            asked.setdefault(parameters["place"], {})[parameters["case"].name] = None
            asked["reference"][parameters["case"].training] = None
    return lambda place: results_of(place, folder, tuple(asked[place]))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" or report.outcome != "passed":
        why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else ""
        if report.when != "teardown":
            report.user_properties.append(("gpu_row", (item.name, report.outcome, why.removeprefix("Skipped: "))))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints what ran, what passed, and what was skipped and why."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "gpu_row"
    ]
    if rows:
        gpus = num_gpus()
        where = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU: CPU workers stood in"
        terminalreporter.section(f"tests/gpu, {where}")
        for name, outcome, why in dict.fromkeys(map(tuple, rows)):
            terminalreporter.write_line(f"{outcome:8} {name}{'  ' + why if why else ''}")
