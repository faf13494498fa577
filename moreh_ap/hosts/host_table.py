"""What was found out about hosts, as one table.

Decides its columns. Must not know what was looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moreh_ap.hosts.joining_checks import Row


def show(rows: Sequence[Row], console: Console) -> None:
    """Prints a table with a column for each host, and below it a line to paste for all that is not as it has to be."""
    hosts, subjects = list(dict.fromkeys(row.host for row in rows)), list(dict.fromkeys(row.what for row in rows))
    table = Table(title="Hosts", title_justify="left")
    for column in ("", "expected", *hosts):
        table.add_column(column, overflow="fold")
    for what in subjects:
        found = {row.host: row for row in rows if row.what == what}
        expected = next((row.expected for row in found.values() if row.expected), "")
        table.add_row(Text(what), Text(expected), *(_cell(found.get(host)) for host in hosts))
    console.print(table)
    for row in rows:
        if not row.ok:
            console.print(f"{row.host}, {row.what}: {row.fix}", markup=False, highlight=False, soft_wrap=True)


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text()
    return Text(row.seen) if row.ok else Text(f"✗ {row.seen}", style="bold red")
