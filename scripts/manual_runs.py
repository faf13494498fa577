"""Runs the scripts of `tutorials/manual` and the one line in pairs, and says what came out.

Decides sizes, order of runs and what is kept of them. Must not know how one script is run (`bench_overhead.py`) nor how
the page reads that shows the figures.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import statistics
from datetime import date
from pathlib import Path
from typing import Any

from bench_overhead import ONE_LINE, SINGLE, flags_of_plan, measured, run
from manual_counterparts import Counterpart

from moreh_ap.plan import Plan

HIGHEST_DIFFERENCE = 1e-5  # between the losses of a step, relative
NUM_LAYERS = 4
FLAGS = f"--layers {NUM_LAYERS} --hidden 256 --vocabulary 4096 --batch-size 16 --block-size 128 --steps 8"
TIMEOUT_S = 500.0

Entry = dict[str, Any]


def largest_difference(entry: Entry) -> float:
    """Returns the largest relative difference of a step's loss from one device.

    Raises:
        ValueError: It is above `HIGHEST_DIFFERENCE`: the scripts do not train the same.
    """
    alone = entry["losses"]["one_device"]
    others = [losses for name, losses in entry["losses"].items() if name != "one_device"]
    largest = max(abs(loss - right) / right for losses in others for loss, right in zip(losses, alone, strict=True))
    if largest > HIGHEST_DIFFERENCE:
        raise ValueError(
            f"plan {entry['plan']!r}: losses differ by {largest:.1e}; allowed are {HIGHEST_DIFFERENCE:.0e}"
        )
    return largest


def ratios_of(entry: Entry) -> tuple[float, float, float]:
    """Returns median, lowest and highest of the step times' ratios, one line to by hand, each within a pair of runs."""
    ratios = [pair["one_line_s"] / pair["by_hand_s"] for pair in entry["pairs"]]
    return statistics.median(ratios), min(ratios), max(ratios)


def was_busy(entry: Entry) -> bool:
    """Returns whether so much else ran on the machine that a ratio of step times says nothing.

    The load of the runs themselves is at most a process for each device and the controller.
    """
    return max(entry["load"]) > max(entry["cores"], Plan.parse(entry["plan"]).num_devices + 1) + 1


def run_alone() -> list[float]:
    """Returns the losses of the script for one device."""
    return run(SINGLE, FLAGS.split(), devices=1, threads=1, timeout_s=TIMEOUT_S)["losses"]


def measure(counterpart: Counterpart, alone: list[float], num_pairs: int) -> Entry:
    """Returns what the one line and a script by hand give, which run in pairs, in turns.

    Args:
        counterpart: The script by hand.
        alone: The losses of one device.
        num_pairs: Pairs of runs.
    """
    plan, common = Plan.parse(counterpart.plan), FLAGS.split()
    by_hand = flags_of_plan(counterpart.name, plan, NUM_LAYERS)
    flags = {ONE_LINE: ["--plan", counterpart.plan], counterpart.name: by_hand}
    loads = [os.getloadavg()[0]]
    losses, pairs = {"one_device": alone}, []
    for number in range(num_pairs):
        order = list(flags) if number % 2 == 0 else list(flags)[::-1]
        reports = {
            name: run(name, [*common, *flags[name]], plan.num_devices, threads=1, timeout_s=TIMEOUT_S) for name in order
        }
        ours, theirs = reports[ONE_LINE], reports[counterpart.name]
        pairs.append({"one_line_s": measured(ours, "steps"), "by_hand_s": measured(theirs, "steps")})
        losses |= {f"one_line_{number + 1}": ours["losses"], f"by_hand_{number + 1}": theirs["losses"]}
        loads.append(os.getloadavg()[0])
        print(f"{counterpart.name}, pair {number + 1} of {num_pairs}: {pairs[-1]}", flush=True)
    packages = ("torch", "transformers", *(["deepspeed"] if counterpart.name == "deepspeed" else []))
    entry = {
        "plan": counterpart.plan,
        "flags": FLAGS,
        "date": date.today().isoformat(),
        "machine": _machine(),
        "cores": os.cpu_count(),
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
        "load": [round(min(loads), 1), round(max(loads), 1)],
        "pairs": pairs,
        "losses": losses,
    }
    largest_difference(entry)
    return entry


def _machine() -> str:
    """Returns the machine in words: processors, cores, memory."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}), {memory_gib:.0f} GiB, CPU workers"


def machine_of(entry: Entry) -> dict[str, str]:
    """Returns the parts of what `_machine` wrote, for other languages: cores, processor, memory_gib.

    Raises:
        ValueError: It did not write this.
    """
    parts = re.fullmatch(
        r"(?P<cores>\d+) cores \((?P<processor>.*)\), (?P<memory_gib>\d+) GiB, CPU workers", entry["machine"]
    )
    if parts is None:
        raise ValueError(f"machine is {entry['machine']!r}; expected: N cores (PROCESSOR), N GiB, CPU workers")
    return parts.groupdict()
