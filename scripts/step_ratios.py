"""The step time of the one line over that of a script by hand, as every page of the site shows it.

Decides which measurement counts: the figure of `docs/benchmarks.md`, and what `compare_manual.py` has measured where
there is none. Must not know how a page reads.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import benchmarks_page
from manual_runs import Entry, ratios_of, was_busy

FIGURE_OF = {"ddp": "ddp", "fsdp": "fsdp", "tp": "tensor", "pp": "pipeline", "3d": "3d"}
"""Name of a script by hand: that of its figure."""


class StepRatio(NamedTuple):
    """A median of ratios within pairs of runs, the interval beside it, and the number of pairs."""

    median: float
    low: float
    high: float
    num_pairs: int


def step_ratio_of(name: str, entry: Entry) -> StepRatio | None:
    """Returns the ratio for a script by hand; None if nothing was measured on a machine that was idle enough.

    Args:
        name: Its name in `manual_counterparts.py`.
        entry: What `compare_manual.py` has measured of it.
    """
    figure = benchmarks_page.read_results(benchmarks_page.RESULTS).get(FIGURE_OF.get(name, ""))
    if figure is not None:
        pairs, _ = benchmarks_page.compared(figure)
        low, high, _ = benchmarks_page.interval(pairs)
        return StepRatio(statistics.median(pairs), low, high, len(pairs))
    return None if was_busy(entry) else StepRatio(*ratios_of(entry), len(entry["pairs"]))
