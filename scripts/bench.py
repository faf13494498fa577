#!/usr/bin/env python
"""Measures the figures of docs/benchmarks.md, keeps them in docs/benchmarks.json, and writes the page anew.

    make bench                              # the usual figures, six pairs each, on an idle machine
    make bench FIGURES="ddp fsdp" PAIRS=10  # some of them
    python scripts/bench.py --list          # which there are

Decides the order of runs and what is kept of them. Each figure is measured by the script that is made for it
(`bench_overhead.py`, `bench_split.py`, `bench_small_models.py`, `bench_planner.py`). Of two runs that are compared one
follows the other at once, in turns one first and the other; so the last run of a pair and the first of the next are of
the same script, and each two such neighbours are an A/A pair, whose ratio shows what the machine's noise makes of two
equal runs. Figures are kept as soon as they are measured: a run that is interrupted loses one.
"""

from __future__ import annotations

import argparse
import compileall
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_overhead
import benchmarks_page
from bench_figures import FIGURES, RESULTS, ROOT, USUAL, Figure, digest

from moreh_ap import checked_versions

OURS, THEIRS = "ours", "theirs"
TIMEOUT_S = 3600.0


def machine() -> str:
    """Returns the processor, the number of cores that this process may use, and the memory."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} x {(names or [platform.machine()])[0]}, {memory_gib:.0f} GiB"


def commit() -> str:
    """Returns the commit that is checked out, with "+" behind it if files of the package differ from it."""
    git = ("git", "-C", str(ROOT))
    found = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    if found.returncode != 0:
        return "?"
    changed = subprocess.run([*git, "status", "--porcelain", "moreh_ap", "scripts", "tutorials"], capture_output=True)
    return found.stdout.strip() + ("+" if changed.stdout.strip() else "")


def circumstances(figure: Figure) -> dict[str, Any]:
    """Returns what is written beside a figure."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": str(checked_versions.installed()),
        "load": round(os.getloadavg()[0], 1),
        "digest": digest(figure.paths),
    }


def overhead_command(figure: Figure) -> list[str]:
    """Returns the command line of `bench_overhead.py` that makes the runs of a figure."""
    mode = ["--empty-model"] if figure.mode == "empty" else []
    return ["bench_overhead.py", "--against", figure.baseline, *mode, *figure.flags]


def overhead_arguments(figure: Figure) -> argparse.Namespace:
    """Returns the arguments of `bench_overhead.py` for a figure."""
    with patch.object(sys, "argv", overhead_command(figure)):
        return bench_overhead.parse_arguments()


def measure_pairs(figure: Figure, also: list[Figure], pairs: int, steps: int | None) -> dict[str, dict[str, Any]]:
    """Returns the runs of a figure and of others that come from the same runs, by name.

    Args:
        figure: What is measured.
        also: Figures of the same runs.
        pairs: How many pairs.
        steps: Steps of each run; None: those of the figure.
    """
    args = overhead_arguments(figure)
    args.steps = steps or args.steps
    command = " ".join(overhead_command(figure))
    entries = {
        one.name: {**circumstances(one), "command": command, "mode": one.mode, "runs": []} for one in (figure, *also)
    }
    for number in range(pairs):
        reports = bench_overhead.run_both(args, figure.mode, figure.baseline, ours_first=number % 2 == 0)
        for script, report in reports.items():
            whose = OURS if script == bench_overhead.ONE_LINE else THEIRS
            for one in (figure, *also):
                entries[one.name]["runs"].append([whose, bench_overhead.measured(report, one.mode)])
        losses = [report["losses"] for report in reports.values()]
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(*losses, strict=True))
        for entry in entries.values():
            entry["losses_differ_by"] = max(apart, entry.get("losses_differ_by", 0.0))
        print(f"{figure.name}: pair {number + 1} of {pairs}: " + ", ".join(
            f"{one.name} {entries[one.name]['runs'][-2:]}" for one in (figure, *also)), flush=True)  # fmt: skip
    return entries


def measure_printed(figure: Figure, pairs: int) -> dict[str, Any]:
    """Returns what the script of a figure prints."""
    command = [*figure.flags, str(pairs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    run = [sys.executable, str(ROOT / "scripts" / command[0]), *command[1:]]
    entry = {**circumstances(figure), "command": " ".join(command)}
    done = subprocess.run(run, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    lines = [line.rstrip() for line in done.stdout.splitlines() if not line.startswith("[info]")]
    return {**entry, "printed": lines}


def main() -> int:
    """Runs the command line; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", help=f"which (default: {' '.join(USUAL)})")
    parser.add_argument("--pairs", type=int, default=6, help="pairs, or rounds, of each figure (default: 6)")
    parser.add_argument("--steps", type=int, help="steps a run, to try the chain (default: those of the figure)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where they are kept; the page is written if here"
    )
    parser.add_argument("--list", action="store_true", help="print the figures and end")
    options = parser.parse_args()
    if options.list:
        for figure in FIGURES.values():
            print(f"{figure.name:9} {' '.join((figure.baseline, figure.mode, *figure.flags))}")
        return 0
    unknown = [name for name in options.figures if name not in FIGURES]
    if unknown or options.pairs < 1:
        parser.error(f"no figure is called {', '.join(unknown)}: there are {', '.join(FIGURES)}"
                     if unknown else "--pairs is at least 1")  # fmt: skip
    for name in ("moreh_ap", "scripts", "tutorials"):  # as pip does; a checkout may have been changed since it last ran
        compileall.compile_dir(ROOT / name, quiet=2)
    begun_s = time.monotonic()
    wanted = [FIGURES[name] for name in FIGURES if name in (options.figures or USUAL)]
    # A figure without runs of its own is measured by those of another, and so is that one.
    owners = list(dict.fromkeys(one.same_runs_as or one.name for one in wanted))
    for figure in (FIGURES[name] for name in owners):
        also = [one for one in FIGURES.values() if one.same_runs_as == figure.name]
        if figure.baseline:
            entries = measure_pairs(figure, also, options.pairs, options.steps)
        else:
            entries = {figure.name: measure_printed(figure, options.pairs)}
        results = benchmarks_page.read_results(options.results) if options.results.exists() else {}
        results.update(entries)
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        if options.results == RESULTS:
            benchmarks_page.write_pages(results)
    print(f"{time.monotonic() - begun_s:.0f} s; {options.results}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
