#!/usr/bin/env python
"""Draws the charts of the site from figures that other commands have written.

    python scripts/draw_charts.py            # writes docs/assets/charts/*.svg
    python scripts/draw_charts.py --check    # writes nothing; exits with 1 if a chart is of other figures

Decides how figures look: which colour stands for what, in light and dark, wide and on a phone. Must not know how they
were measured. `compare` reads the scripts of `tutorials/manual` and docs/benchmarks.json, `memory` the table of
docs/planner.md, `loss-NAME` the run that the page of a tutorial shows, `plan-NAME` what the planner says of its plans
(`plan_charts.py`). `chart_words.json` has the words.

A chart is text and lines in an SVG; the reader's own fonts draw the text. Colours are named in `COLOURS`, each with
the one that replaces it where the reader's system is dark.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import plan_charts
from compare_manual import MEASURED, changed_lines, concepts_of, lines_of
from manual_counterparts import COUNTERPARTS, ONE_LINE, SINGLE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from step_ratios import step_ratio_of

ROOT = Path(__file__).resolve().parents[1]
CHARTS = ROOT / "docs" / "assets" / "charts"
TUTORIALS = ROOT / "docs" / "tutorials"
PLANNER_PAGE = ROOT / "docs" / "planner.md"
WORDS = Path(__file__).with_name("chart_words.json")

INK, SOFT, GRID, PAGE = "#1d2433", "#566079", "#d5dae6", "#f7f8fb"
ONE_LINE_COLOUR, BY_HAND_COLOUR, MEASURED_COLOUR = "#5b6ee1", "#b5651d", "#2f9e77"
COLOURS = {
    INK: "#e8ecf6",
    SOFT: "#aab4cb",
    GRID: "#333b50",
    PAGE: "#171b26",
    ONE_LINE_COLOUR: "#8b9bff",
    BY_HAND_COLOUR: "#e5a35c",
    MEASURED_COLOUR: "#4fc59a",
    "#4477aa": "#6f9fd6",
    "#66ccee": "#66ccee",
    "#228833": "#4cb45f",
    "#ccbb44": "#ccbb44",
    "#ee6677": "#ee6677",
    "#aa3377": "#cf63a3",
    "#bbbbbb": "#8b93a5",
}
"""Each colour of a chart, and the one in its place where the reader's system is dark."""

RUNS = ("gpt", "mistral", "llama2", "llama3-70b", "lora", "llm")
"""Pages of tutorials that show the losses of a run."""

PLANS = ("gpt", "mistral", "llama2", "llama3-70b", "lora", "llm")
"""Those that show what a device holds under their plans."""

_PIXELS_PER_INCH = 72  # an SVG of matplotlib counts points
_MARGIN = 0.12  # in inches
_ROW = re.compile(r"^\| (\S+) \| `([^`]+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \|$", re.MULTILINE)

_STEP, _LOGGED_STEP = r"step (\d+)/\d+\] loss ([\d.]+)", r"'global_step': (\d+), .*'running_loss': ([\d.]+)"
_HELD_OUT = r"held-out loss before: ([\d.]+), after: ([\d.]+)"

Words = dict[str, str]


@dataclass(frozen=True)
class Chart:
    """A chart that is drawn once for each language, and for phones where it has a shape of its own.

    Attributes:
        name: The file is `<name>.svg`, `<name>.ko.svg`, `<name>-narrow.svg`, ...
        figures: What it shows; anything that JSON can hold.
        draw: Draws the figures with words, for a phone or not.
        has_narrow: Whether phones get another shape.
    """

    name: str
    figures: Any
    draw: Callable[[Any, Words, bool], Figure]
    has_narrow: bool = False

    def files(self) -> dict[Path, tuple[str, bool]]:
        """Returns language and shape of each file."""
        found = {}
        for narrow in (False, True) if self.has_narrow else (False,):
            for language in ("en", "ko"):
                suffix = ("-narrow" if narrow else "") + ("" if language == "en" else f".{language}")
                found[CHARTS / f"{self.name}{suffix}.svg"] = (language, narrow)
        return found


# -- figures -------------------------------------------------------------------------------------------------------


def charts() -> list[Chart]:
    """Returns all charts with the figures of now."""
    found = [
        Chart("compare", comparison(), draw_comparison, has_narrow=True),
        Chart("memory", tracked_memory(), draw_memory),
    ]
    found += [Chart(f"loss-{name}", losses_of(TUTORIALS / f"{name}.md"), draw_losses) for name in RUNS]
    return found + [Chart(f"plan-{name}", plan_charts.figures_of(name), draw_plans) for name in PLANS]


def comparison() -> list[dict[str, Any]]:
    """Returns lines, concepts and rounded ratio of step times, for the one line and each script by hand."""
    entries = json.loads(MEASURED.read_text(encoding="utf-8"))
    single = _text(SINGLE)
    rows: list[dict[str, Any]] = [
        {
            "name": "one line",
            "lines": changed_lines(single, _text(ONE_LINE))[0],
            "concepts": len(concepts_of(ROOT / ONE_LINE)),
            "ratio": None,
        }
    ]
    for counterpart in COUNTERPARTS:
        measured = step_ratio_of(counterpart.name, entries[counterpart.name])
        ratio = [round(one, 2) for one in measured[:3]] if measured else None
        concepts = len(concepts_of(ROOT / counterpart.path))
        rows.append({"name": counterpart.name, "lines": lines_of(counterpart)[0], "concepts": concepts, "ratio": ratio})
    return rows


def tracked_memory() -> list[list[float]]:
    """Returns tracked and predicted GiB of each row of the planner page's table."""
    return [[float(row[4]), float(row[5])] for row in _ROW.finditer(PLANNER_PAGE.read_text(encoding="utf-8"))]


def losses_of(page: Path) -> dict[str, Any]:
    """Returns steps and losses of the run that a tutorial's page shows, and its held-out losses."""
    text = page.read_text(encoding="utf-8")
    points = re.findall(_STEP, text) or re.findall(_LOGGED_STEP, text)
    held_out = re.search(_HELD_OUT, text)
    return {
        "steps": [int(step) for step, _ in points],
        "losses": [float(loss) for _, loss in points],
        "held_out": [float(loss) for loss in held_out.groups()] if held_out else [],
    }


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# -- drawings ------------------------------------------------------------------------------------------------------


def draw_comparison(rows: list[dict[str, Any]], words: Words, narrow: bool) -> Figure:
    """Draws lines, concepts and step time of each script: beside each other, or on a phone one below the other."""
    figure = _figure(360, 760) if narrow else _figure(860, 300)
    panels = figure.subplots(3, 1) if narrow else figure.subplots(1, 3, sharey=True)
    names = [words[row["name"]] for row in rows]
    colours = [ONE_LINE_COLOUR, *[BY_HAND_COLOUR] * (len(rows) - 1)]
    places = range(len(rows))
    for axes, key in zip(panels, ("lines", "concepts"), strict=False):
        values = [row[key] for row in rows]
        axes.barh(places, values, color=colours, height=0.6)
        for place, value in zip(places, values, strict=True):
            axes.text(value + max(values) * 0.02, place, str(value), va="center", color=INK)
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_xticks([])
    axes = panels[2]
    axes.axvline(1, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    for place, row in zip(places, rows, strict=True):
        if row["ratio"]:
            median, low, high = row["ratio"]
            axes.plot([low, high], [place, place], color=ONE_LINE_COLOUR, linewidth=2)
            axes.plot([median], [place], "o", color=ONE_LINE_COLOUR)
            axes.text(high + 0.02, place, f"x{median:.2f}", va="center", color=INK, backgroundcolor=PAGE)
        elif place:
            axes.text(1.02, place, words["not measured"], va="center", color=SOFT)
    axes.set_xlim(0.75, 1.6)
    axes.set_xticks([0.8, 1.0, 1.2, 1.4])
    for axes, title in zip(panels, ("lines", "concepts", "ratio"), strict=True):
        _plain(axes)
        axes.set_title(words[title], loc="left", color=INK, fontsize=14)
        axes.set_yticks(list(places), names)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure


def draw_memory(points: list[list[float]], words: Words, narrow: bool) -> Figure:
    """Draws predicted over tracked memory, both in GiB and by powers."""
    figure = _figure(440, 400)
    axes = figure.subplots()
    tracked, predicted = zip(*points, strict=True)
    low, high = min(tracked) * 0.8, max(tracked) * 1.25
    axes.fill_between([low, high], [low * 0.92, high * 0.92], [low * 1.08, high * 1.08], color=GRID, linewidth=0)
    axes.plot([low, high], [low, high], color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(tracked, predicted, "o", color=MEASURED_COLOUR, markersize=6)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    ticks = [tick for tick in (2, 4, 8, 16, 32, 64, 128) if low < tick < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib.ticker.FixedLocator(ticks))
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:.0f}"))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
    _plain(axes, grid=True)
    axes.set_xlabel(words["tracked"], color=INK)
    axes.set_ylabel(words["predicted"], color=INK)
    axes.text(0.04, 0.94, words["band"], transform=axes.transAxes, color=SOFT, va="top")
    return figure


def draw_losses(run: dict[str, Any], words: Words, narrow: bool) -> Figure:
    """Draws the losses of a run in nats a token over its steps, and those on held-out data before and after it."""
    figure = _figure(440, 280)
    axes = figure.subplots()
    steps = run["steps"]
    axes.plot(steps, run["losses"], color=ONE_LINE_COLOUR, linewidth=1.8, label=words["training"])
    if run["held_out"]:
        axes.plot([0, steps[-1]], run["held_out"], "o", color=MEASURED_COLOUR, markersize=8, label=words["held out"])
    _plain(axes, grid=True)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel(words["step"], color=INK)
    axes.set_ylabel(words["loss"], color=INK)
    axes.legend(frameon=False, labelcolor=INK)
    return figure


def draw_plans(figures: dict[str, Any], words: Words, narrow: bool) -> Figure:
    """Draws what a device holds under each plan of a tutorial."""
    figure = _figure(440, plan_charts.height_of(figures))
    axes = figure.subplots()
    _plain(axes)
    plan_charts.draw_bars(axes, figures, words, INK, SOFT)
    return figure


def _figure(width: int, height: int) -> Figure:
    """Returns an empty figure of so many pixels."""
    size = (width / _PIXELS_PER_INCH, height / _PIXELS_PER_INCH)
    layout = ConstrainedLayoutEngine(w_pad=_MARGIN, h_pad=_MARGIN)
    return Figure(figsize=size, dpi=_PIXELS_PER_INCH, layout=layout, facecolor=PAGE)


def _plain(axes: Axes, *, grid: bool = False) -> None:
    """Leaves of the axes what the eye needs."""
    axes.set_facecolor(PAGE)
    axes.tick_params(colors=SOFT, labelsize=12)
    for side, spine in axes.spines.items():
        spine.set(color=GRID, visible=grid and side in ("left", "bottom"))
    if grid:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)


# -- files -----------------------------------------------------------------------------------------------------------


def svg_of(chart: Chart, words: Words, *, narrow: bool) -> str:
    """Returns a chart as an SVG whose text is text, which says what it shows, and which has colours for the dark."""
    buffer = io.StringIO()
    settings = {"svg.fonttype": "none", "svg.hashsalt": "moreh_ap", "font.size": 13, "text.color": INK}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # only measured with that font
        figure = chart.draw(chart.figures, words, narrow)
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(
        r"(font: [^']*?)'[^';]+'(?:, '[^']+')*(?:, sans-serif)?", r"\1system-ui, 'Noto Sans KR', sans-serif", text
    )
    rules = "".join(
        f'[style*="fill: {light}"]{{fill:{dark}!important}}[style*="stroke: {light}"]{{stroke:{dark}!important}}'
        for light, dark in COLOURS.items()
    )
    head = (
        f"<title>{words[chart.name.partition('-')[0]]}</title>{_mark(chart, words)}\n"
        f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n"
    )
    begin = text.index(">") + 1
    return text[:begin].replace("<svg ", '<svg role="img" ', 1) + "\n" + head + text[begin:].strip() + "\n"


def _mark(chart: Chart, words: Words) -> str:
    """Returns what says of a file that it shows these figures in these words."""
    digest = hashlib.sha256(json.dumps([chart.figures, words], sort_keys=True).encode()).hexdigest()
    return f"<!-- figures {digest[:16]} -->"


def main() -> int:
    """Writes or checks the charts and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a chart is of other figures"
    )
    args = parser.parse_args()
    words = json.loads(WORDS.read_text(encoding="utf-8"))
    status = 0
    for chart in charts():
        for file, (language, narrow) in chart.files().items():
            if not args.check:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(svg_of(chart, words[language], narrow=narrow), encoding="utf-8")
            elif not file.is_file() or _mark(chart, words[language]) not in file.read_text(encoding="utf-8"):
                print(f"{file.relative_to(ROOT)} is of other figures; python scripts/draw_charts.py", file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
