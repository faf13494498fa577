"""What a check found: ok, a warning or a failure, and what to do about it.

Decides how a finding reads. Must not know what is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

OK, WARNING, FAILED = "ok", "warning", "failed"
_STYLES = {OK: "green", WARNING: "yellow", FAILED: "bold red"}


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: What was checked.
        status: OK, WARNING or FAILED.
        found: What was found, with its values.
        fix: What to do, or a line to paste; empty if all is well.
    """

    name: str
    status: str
    found: str
    fix: str = ""


def show(findings: Iterable[Finding], console: Console) -> None:
    """Prints a line for each finding, as it comes, and below it what to do."""
    for finding in findings:
        line = Table.grid(padding=(0, 2))
        line.add_column(width=7)
        line.add_column(width=14)
        line.add_column(overflow="fold")
        line.add_row(Text(finding.status, _STYLES[finding.status]), finding.name, finding.found)
        if finding.fix:
            line.add_row("", "", f"fix: {finding.fix}")
        console.print(line)


def summary(findings: list[Finding]) -> str:
    """Returns one line about all of them."""
    failed, warned = (sum(finding.status == status for finding in findings) for status in (FAILED, WARNING))
    counts = [f"{failed} failed" if failed else "", f"{warned} warning{'s' if warned > 1 else ''}" if warned else ""]
    return f"{len(findings)} checks: {', '.join(filter(None, counts)) or 'all ok'}"
