"""Charts of a report, as SVG: lines over steps, bars of memory, and the timeline of a step.

Decides where points and bars lie. Colours are classes of the page's style sheet, so that they follow its dark mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 640, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 12, 28
_MOST_POINTS = 600
_MOST_TICKS = 5


@dataclass(frozen=True)
class LineChart:
    """Points of a line in a box of `WIDTH` x `HEIGHT`, with ticks: (position, label) each.

    Attributes:
        points: "x,y x,y ..." of the line.
        across: Ticks of the steps.
        up: Ticks of the values.
        level: y of a dashed line to compare with; None: none.
    """

    points: str
    across: list[tuple[float, str]]
    up: list[tuple[float, str]]
    level: float | None


def line_chart(values: Sequence[float | None], level: float | None = None) -> LineChart | None:
    """Returns the chart of a value a step; None if fewer than two steps have one.

    Args:
        values: By step, the first step first.
        level: A value to compare with.
    """
    known = [(step, value) for step, value in enumerate(values, 1) if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return None
    known = known[:: math.ceil(len(known) / _MOST_POINTS)]
    heights = [value for _, value in known] + ([] if level is None else [level])
    ticks = _ticks(min(heights), max(heights))
    low, high = min(ticks[0], *heights), max(ticks[-1], *heights)
    first, last = known[0][0], known[-1][0]

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(last - first, 1) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - _TOP - _BOTTOM)

    return LineChart(
        " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in known),
        [(x(tick), f"{tick:g}") for tick in _ticks(first, last) if first <= tick <= last and tick == int(tick)],
        [(y(tick), f"{tick:,.6g}") for tick in ticks if low <= tick <= high],
        None if level is None else y(level),
    )


def shares(parts: dict[str, float], capacity: float) -> list[tuple[str, float, float]]:
    """Returns (name, per cent of the capacity where it begins, per cent that it takes) of the parts of a bar."""
    found, begin = [], 0.0
    for name, size in parts.items():
        share = 100.0 * size / max(capacity, 1.0)
        if share > 0:
            found.append((name, begin, share))
        begin += share
    return found


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: its process and thread, and the spans in it.

    Attributes:
        spans: (left, width, category, what it is) of each span; left and width in per cent of the step.
    """

    name: str
    spans: list[tuple[float, float, str, str]]


def lanes(timeline: Sequence[dict[str, Any]]) -> list[Lane]:
    """Returns the rows of a step's timeline, those of the script first."""
    if not timeline:
        return []
    length_ms = max(span["began_ms"] + span["ms"] for span in timeline) or 1.0
    rows: dict[str, list[tuple[float, float, str, str]]] = {}
    for span in timeline:
        said = f"{span['name']}: {span['ms']:.2f} ms"
        row = rows.setdefault(f"{span['process']}, {span['lane']}", [])
        row.append((100 * span["began_ms"] / length_ms, 100 * span["ms"] / length_ms, span["category"], said))
    return [Lane(name, spans) for name, spans in rows.items()]


def _ticks(low: float, high: float) -> list[float]:
    """Returns round numbers from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / _MOST_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= _MOST_TICKS)
    begin = math.floor(low / step + 1e-9)
    end = math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.10g}") for index in range(begin, end + 1)]
