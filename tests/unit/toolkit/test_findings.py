"""How findings read."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moreh_ap.toolkit.findings import FAILED, OK, WARNING, Finding, show, summary


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ([OK, OK], "2 checks: all ok"),
        ([OK, WARNING], "2 checks: 1 warning"),
        ([WARNING, WARNING, FAILED], "3 checks: 1 failed, 2 warnings"),
    ],
)
def test_summary(statuses, said):
    assert summary([Finding("name", status, "found") for status in statuses]) == said


def test_what_to_do_is_below_what_was_found():
    text = io.StringIO()
    findings = [Finding("memory", OK, "much"), Finding("shm", FAILED, "[none]", "mount it")]
    show(findings, Console(file=text, width=80, markup=False))
    lines = [line.split() for line in text.getvalue().splitlines()]
    assert lines == [["ok", "memory", "much"], ["failed", "shm", "[none]"], ["fix:", "mount", "it"]]
