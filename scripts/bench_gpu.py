#!/usr/bin/env python
"""Measures a step of the one line on one GPU, beside a plain script and beside FSDP2 with compiled blocks.

    python scripts/bench_gpu.py                    # the width of an 8B model, then GPT-2 124M: within 8 minutes
    python scripts/bench_gpu.py --size 8b --changes --rounds 2 --minutes 30
    python scripts/bench_gpu.py --size toy         # anywhere: shows that the bench works

Each run is a fresh process; the ways take turns in which comes first. Step times are medians by CUDA events, tokens a
second and MFU (6 N without the embedding, 12 L H S) by the clock around all timed steps, memory is what the allocator
held at most, and idle is the part of two more, profiled steps in which no kernel ran. The last column says whether
blocks ran compiled in these: the one line decides that in the warm-up, which is as long for every way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_gpu_ways import CHANGES, LINE, SIZES, WAYS

from moreh_ap.errors import OptionError
from moreh_ap.planner.cost.hardware import find_device

_SCRIPT = Path(__file__).with_name("bench_gpu_ways.py")
_RUN_S = 300.0
AIMS = {"8b": 1.00, "124m": 1.05}
"""Highest step time of the one line, in those of `fsdp`."""
NO_GPU = "There is no GPU here: this shows that the bench works, and its figures mean nothing."


def order(ways: Sequence[str], round_number: int) -> list[str]:
    """Returns the ways in the order of a round: every other one backwards."""
    return list(ways) if round_number % 2 == 0 else list(reversed(ways))


def run(way: str, size: str) -> dict[str, Any]:
    """Returns what a run measured; "error" with the end of its output if it failed."""
    try:
        done = subprocess.run([sys.executable, str(_SCRIPT), way, size], capture_output=True, text=True, timeout=_RUN_S)
        lines = [line for line in done.stdout.splitlines() if line.startswith("BENCH ")]
        if done.returncode == 0 and lines:
            found: dict[str, Any] = json.loads(lines[-1].removeprefix("BENCH "))
            return found
        said = f"{done.stdout}\n{done.stderr}"
    except subprocess.TimeoutExpired:
        said = f"still running after {_RUN_S:g} s"
    return {"way": way, "error": said[-3000:]}


def mfu(found: dict[str, Any]) -> float | None:
    """Returns the part of the device's peak in bfloat16 that a run computed at; None for a device without data."""
    try:
        return float(found["flops_per_s"] / find_device(found["device"]).peak_flops("bf16"))
    except OptionError:
        return None


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each way: medians over its runs."""
    lines = [
        f"{'way':16} {'step':>9} {'tokens/s':>10} {'MFU':>6} {'memory':>9} {'idle':>6} {'start':>7} {'last loss':>9}  "
        "blocks"
    ]
    for way in dict.fromkeys(one["way"] for one in runs):
        good = [one for one in runs if one["way"] == way and "error" not in one]
        if not good:
            lines.append(f"{way:16} failed")
            continue

        def median(name: str, good: list[dict[str, Any]] = good) -> float | None:
            values = [one[name] for one in good if one[name] is not None]
            return statistics.median(values) if values else None

        shares = {"mfu": mfu(good[0]) and statistics.median(mfu(one) or 0.0 for one in good), "idle": median("idle")}
        percent = {name: "-" if value is None else f"{100 * value:.1f}%" for name, value in shares.items()}
        step_s, tokens, memory, start_s = map(median, ("step_s", "tokens_per_s", "peak_reserved_bytes", "start_s"))
        held = f"{(memory or 0) / 2**30:.1f} GiB" if memory else "-"
        lines.append(
            f"{way:16} {1e3 * (step_s or 0):>6.1f} ms {tokens or 0:>10,.0f} {percent['mfu']:>6} {held:>9} "
            f"{percent['idle']:>6} {start_s or 0:>5.1f} s {good[-1]['losses'][-1]:>9.3f}  "
            f"{' or '.join(sorted({'compiled' if one['compiled'] else 'as written' for one in good}))}"
        )
    return lines


def verdict(size: str, runs: Sequence[dict[str, Any]]) -> str:
    """Returns how the one line compares with the script written by hand; empty where one of them failed."""
    steps = {way: [one["step_s"] for one in runs if one["way"] == way and "error" not in one] for way in (LINE, "fsdp")}
    if not all(steps.values()) or size not in AIMS:
        return ""
    ratio = statistics.median(steps[LINE]) / statistics.median(steps["fsdp"])
    return f"The one line takes {ratio:.2f} times as long as FSDP2 with compiled blocks (aim: {AIMS[size]:.2f})."


def main() -> int:
    """Runs what was asked for; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["8b", "124m"])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=["plain", "fsdp", LINE], help="what is compared")
    parser.add_argument("--changes", action="store_true", help="the plain script with each change alone as well")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no run begins that would probably end later")
    parser.add_argument("--json", type=Path, help="where to write what was measured")
    arguments = parser.parse_args()
    ways = [*arguments.ways, *((*CHANGES, "line_replicate") if arguments.changes else ())]
    ends_s, failed, everything = time.monotonic() + 60 * arguments.minutes, False, {}
    for size in arguments.size:
        runs: list[dict[str, Any]] = []
        left_out: list[str] = []
        longest_s = 0.0
        for round_number in range(arguments.rounds):
            for way in order(ways, round_number):
                if time.monotonic() + longest_s > ends_s:
                    left_out.append(way)
                    continue
                began_s = time.monotonic()
                runs.append(run(way, size))
                longest_s = max(longest_s, time.monotonic() - began_s)
        everything[size] = runs
        devices = {one["device"] for one in runs if "error" not in one}
        print(f"\n{size} on {', '.join(sorted(devices)) or 'nothing'}", *table(runs), sep="\n")
        for one in runs:
            if "error" in one:
                failed = True
                print(f"{one['way']} failed:\n{one['error']}", file=sys.stderr)
        for line in (verdict(size, runs), f"Left out, for lack of time: {', '.join(left_out)}" if left_out else ""):
            if line:
                print(line)
        if "CPU" in devices:
            print(NO_GPU)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
