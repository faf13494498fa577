"""A table that keeps every figure whole in a narrow terminal.

Decides what gives way where the terminal is narrower than the table: first columns of words are broken into lines, then
headings are shortened and used and total memory become one column, and last the space beside cells goes. Figures and
numbers of processes are never cut. Must not know what the columns mean beyond their headings.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_SHORTER = {"Utilization": "Util", "Temperature": "Temp", "Losses Survived": "Lost"}
_USED, _TOTAL, _BOTH = "Memory Usage", "Total Memory", "Memory"
_LEFT = ("Device", "Host", "Name", "Model", "Plan", "Started", "Process")
_BREAKS = {"Host": 9, "Name": 9, "Model": 10, "Plan": 14, "Started": 10, "Process": 14}
"""Columns of words, and how narrow they may get."""


class FittingTable:
    """Rows of cells under headings, as wide as they need or as there is room.

    Args:
        columns: The headings.
        title: A line above the table, at its right.
    """

    def __init__(self, *columns: str, title: str = "") -> None:
        self._columns, self._title = columns, title
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Adds a row: a cell for each column."""
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        merged, rows = _merged(self._columns, self._rows)
        given = (self._columns, self._rows, 1)
        for columns, cells, padding in (given, (merged, rows, 1), (merged, rows, 0)):
            beside = len(columns) * (2 * padding + 1) + 1
            widths = _widths(columns, cells, options.max_width - beside)
            if sum(widths) + beside <= options.max_width:
                break
        yield _table(columns, cells, widths, self._title, padding)


def _merged(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Returns shorter headings, with used and total memory in one column."""
    names = [_SHORTER.get(column, column) for column in columns]
    if _USED not in names or _TOTAL not in names:
        return names, list(rows)
    used, total = names.index(_USED), names.index(_TOTAL)
    names[used] = _BOTH
    names.pop(total)
    return names, [(*row[:used], _of(row[used], row[total]), *row[used + 1 : total], *row[total + 1 :]) for row in rows]


def _of(used: str, total: str) -> str:
    return used if used == total else f"{used.removesuffix(' MiB')} / {total}"


def _widths(columns: Sequence[str], rows: Sequence[tuple[str, ...]], room: int) -> list[int]:
    """Returns the width of each column: what it needs, but for columns of words, the widest of which gives way."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    least = [min(width, _BREAKS.get(column, width)) for column, width in zip(columns, widths)]
    while sum(widths) > room and widths != least:
        widest = max(range(len(columns)), key=lambda place: widths[place] if widths[place] > least[place] else 0)
        widths[widest] -= 1
    return widths


def _table(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], widths: Sequence[int], title: str, padding: int
) -> Table:
    table = Table(
        box=box.ASCII_DOUBLE_HEAD, title=title or None, title_justify="right", title_style="", padding=(0, padding)
    )
    for column, width in zip(columns, widths):
        table.add_column(column, justify="left" if column in _LEFT else "right", overflow="fold", width=width)
    for row in rows:
        # a plan breaks behind a comma
        table.add_row(*(cell if len(cell) <= width else cell.replace(",", ", ") for cell, width in zip(row, widths)))
    return table
