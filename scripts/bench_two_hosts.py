#!/usr/bin/env python
"""Step time on two hosts with one worker each: the one line against `torchrun --nnodes 2`, in pairs.

    make bench FIGURES=hosts                 # on an idle machine
    python scripts/bench_two_hosts.py        # the same, alone: at most 5 minutes

The hosts are network namespaces of this machine with a real sshd (`tests/process/hosts_lab.py`; root, iproute2 and
sshd). Both scripts train the same model on the same namespaces, one directly after the other, in turns one first and
the other: `tutorials/manual/train_ddp.py`, started by torchrun on each host, and `tutorials/manual/train_one_line.py`,
started on the first host with both as its hosts. Each worker has one thread. No pair begins that would end after the
given minutes, by the time that the longest has taken; the last line says how many there were, and how busy the machine
was with other work before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench_overhead import SCRIPTS, WARM_UP_STEPS
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "process"))
from hosts_lab import ADDRESSES, MISSING, Lab  # noqa: E402

AIM = 1.03
TIMEOUT_S = 600.0
PORT = "29400"


def one_line(lab: Lab, flags: list[str], report: Path) -> dict[str, Any]:
    """Returns the report of a run with the one line, whose script is on the first host."""
    command = [SCRIPTS / "train_one_line.py", *flags, "--plan", "replicate=2", "--json", report]
    return _read([lab.start(*command, host="a")], report)


def torchrun(lab: Lab, flags: list[str], report: Path) -> dict[str, Any]:
    """Returns the report of a run that torchrun starts on each host."""
    started = []
    for rank, host in enumerate("ab"):
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(rank)]
        where = ["--master-addr", ADDRESSES["a"], "--master-port", PORT]
        command = ["-m", "torch.distributed.run", *nodes, *where, SCRIPTS / "train_ddp.py", *flags, "--json", report]
        started.append(lab.start(*command, host=host, MOREH_HOSTS="", GLOO_SOCKET_IFNAME="eth0"))
    return _read(started, report)


def _read(started: list[subprocess.Popen], report: Path) -> dict[str, Any]:
    """Waits for processes and returns what one of them has written.

    Raises:
        RuntimeError: One ended with an error, or took too long.
    """
    try:
        for process in started:
            said, _ = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                raise RuntimeError(f"a run ended with status {process.returncode}:\n{said[-4000:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    found: dict[str, Any] = json.loads(report.read_text())
    report.unlink()
    return found


def main() -> int:
    """Runs the command line; returns 0, or 2 where there can be no namespaces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all pairs; one is always measured")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    if MISSING:
        print(f"needs {', '.join(MISSING)}")
        return 2
    names = ("layers", "hidden", "batch_size", "block_size", "steps")
    flags = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    ways = {"one line": one_line, "torchrun": torchrun}
    table = Table(title="two hosts with one worker each: median step")
    for column in ("pair", *(f"{name} [s]" for name in ways), "ratio", "losses differ by"):
        table.add_column(column, justify="right")
    ratios, longest_s, load = [], 0.0, os.getloadavg()[0]
    began_s = time.monotonic()
    lab = Lab()
    try:
        for number in range(args.pairs):
            pair_began_s = time.monotonic()
            if ratios and pair_began_s - began_s + longest_s > 60 * args.minutes:
                break
            order = list(ways) if number % 2 == 0 else list(reversed(ways))
            reports = {name: ways[name](lab, flags, lab.shared / "report.json") for name in order}
            ours_s, theirs_s = (statistics.median(reports[name]["step_s"][WARM_UP_STEPS:]) for name in ways)
            apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(*(reports[name]["losses"] for name in ways))]
            ratios.append(ours_s / theirs_s)
            values = (f"{ours_s:.3f}", f"{theirs_s:.3f}", f"x{ratios[-1]:.3f}", f"{max(apart):.0e}")
            table.add_row(str(number + 1), *values)
            longest_s = max(longest_s, time.monotonic() - pair_began_s)
    finally:
        lab.close()
    Console(width=110).print(table)
    median = statistics.median(ratios)
    pairs = f"{len(ratios)} pairs in {(time.monotonic() - began_s) / 60:.1f} minutes, load average before {load:.1f}"
    print(f"median ratio x{median:.3f} (aim: x{AIM}; {pairs})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
