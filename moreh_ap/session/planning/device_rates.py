"""The rates that workers measured on their devices: joined over all workers, and saved in a file.

Decides which worker's figure counts, and which saved entries are valid. Must not know how rates are measured or what
they are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from moreh_ap.protocol.messages.devices import DeviceRates

_ROWS = {
    "products": (str, int, int, float),
    "elementwise": (str, int, float),
    "exchanges": (str, int, int, float, float),
    "between": (str, int, int, float, float),
}
"""The types of the columns of a table."""
_FIGURES = ("start_s", "update_bytes_per_s")
_MOST = 1e18
"""Upper limit of a valid figure, in operations or bytes per second."""


def slowest(answers: Sequence[DeviceRates]) -> DeviceRates:
    """Returns each rate of the slowest worker, since the others wait for it."""
    first = answers[0]
    return DeviceRates(
        products=tuple((*row[:3], min(one.products[i][3] for one in answers)) for i, row in enumerate(first.products)),
        elementwise=tuple(
            (*row[:2], min(one.elementwise[i][2] for one in answers)) for i, row in enumerate(first.elementwise)
        ),
        start_s=max(one.start_s for one in answers),
        update_bytes_per_s=min(one.update_bytes_per_s for one in answers),
        exchanges=_slowest_rows([one.exchanges for one in answers]),
        between=_slowest_rows([one.between for one in answers]),
    )


def _slowest_rows(tables: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple((*rows[0][:3], max(row[3] for row in rows), max(row[4] for row in rows)) for rows in zip(*tables))


def as_entry(rates: DeviceRates) -> dict[str, Any]:
    """Returns rates as they are saved."""
    return asdict(rates)


def rates_of(entry: dict[str, Any] | None) -> DeviceRates | None:
    """Returns saved rates; None if there are none, or if the entry was written by hand or by another version."""
    if entry is None or set(entry) != {*_ROWS, *_FIGURES}:
        return None
    try:
        tables = {name: tuple(_row(row, kinds) for row in entry[name]) for name, kinds in _ROWS.items()}
        figures = {name: _positive(entry[name]) for name in _FIGURES}
    except (TypeError, ValueError):
        return None
    if not tables["elementwise"] or {row[0] for row in tables["products"]} != {row[0] for row in tables["elementwise"]}:
        return None
    # three products of a precision: both lengths long, one of them short
    for precision in {row[0] for row in tables["products"]}:
        sizes = {row[1:3] for row in tables["products"] if row[0] == precision}
        long, short = max(max(size) for size in sizes), min(min(size) for size in sizes)
        if sizes != {(long, long), (short, long), (long, short)} or short == long:
            return None
    return DeviceRates(**tables, **figures)  # type: ignore[arg-type]


def _row(row: Any, kinds: tuple[Callable[[Any], Any], ...]) -> tuple[Any, ...]:
    if not isinstance(row, (list, tuple)) or len(row) != len(kinds):
        raise ValueError(f"{row!r} has not {len(kinds)} entries")
    return tuple(_name(one) if kind is str else kind(_positive(one)) for one, kind in zip(row, kinds, strict=True))


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < _MOST:
        raise ValueError(f"{value!r} is no measured figure")
    return float(value)
