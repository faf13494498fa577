#!/usr/bin/env python
"""Measures what the one line costs beside the torchrun scripts that one would otherwise write.

    python scripts/bench_overhead.py                  # step time, against DDP and FSDP2
    python scripts/bench_overhead.py --empty-model    # milliseconds that the controller adds to a step
    python scripts/bench_overhead.py --startup        # start of the process to the end of the first step

Decides how runs are paired and what is printed. The runs are those of `scripts/baselines`: same model, tokens, steps,
workers and threads. The two runs of a pair follow each other at once, in turns one first and the other, so that a
machine that becomes slower meanwhile is slower for both; the ratio is taken within each pair, and the median over the
pairs is the result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPTS = Path(__file__).resolve().parent / "baselines"
PLAN_AXIS = {"ddp": "replicate", "fsdp2": "shard"}
WARM_UP_STEPS = 2
TERMINATION_S = 45.0  # torchrun gives its processes 30 s
MODES = {  # mode: (unit, better known as, highest ratio or difference that we accept)
    "steps": ("s", "median step time", 1.03),
    "startup": ("s", "start to end of first step", 1.3),
    "empty": ("ms", "median step of an empty model", 3.0),
}


@dataclass(frozen=True)
class Pair:
    """One pair of runs.

    Attributes:
        baseline: `ddp` or `fsdp2`.
        ours: The measured quantity of the run with the one line, in the unit of its mode.
        theirs: The same of the torchrun script.
        loss_difference: Largest relative difference between the losses of a step.
    """

    baseline: str
    ours: float
    theirs: float
    loss_difference: float


class RunFailed(RuntimeError):
    """A benchmark script failed or took too long; the message carries the end of its output."""


def run(script: str, flags: list[str], workers: int, threads: int, timeout_s: float) -> dict:
    """Runs one script of `baselines` in fresh processes and returns its report.

    Args:
        script: `one_line`, `ddp` or `fsdp2`.
        flags: Flags that all of them take, and for `one_line` its own.
        workers: Processes for torchrun, devices for the one line.
        threads: `OMP_NUM_THREADS` of every process.
        timeout_s: The run is killed after so many seconds.

    Raises:
        RunFailed: It ended with an error, or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        if script == "one_line":
            command = [sys.executable, str(SCRIPTS / "one_line.py"), "--devices", str(workers)]
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers),
                       str(SCRIPTS / f"{script}.py")]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "BENCH_STARTED_AT": repr(time.time())}
        status, output = _run_group(command + flags + ["--json", str(report)], environment, folder, timeout_s)
        if status is None:
            raise RunFailed(f"{script} took more than {timeout_s:.0f} s:\n{output[-4000:]}")
        if status != 0 or not report.exists():
            raise RunFailed(f"{script} ended with status {status}:\n{output[-4000:]}")
        return json.loads(report.read_text())


def _run_group(command: list[str], environment: dict, folder: str, timeout_s: float) -> tuple[int | None, str]:
    """Returns (exit status or None after `timeout_s`, output) of a command; however it ends, its children end too."""
    with open(Path(folder) / "output.txt", "w+", errors="replace") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        status = None
        try:
            status = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            pass  # told by the status
        finally:
            if process.poll() is None:
                process.terminate()  # not killed at once: torchrun ends its processes itself
                try:
                    process.wait(timeout=TERMINATION_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        output.seek(0)
        return status, output.read()


def measured(report: dict, mode: str) -> float:
    """Returns the quantity of `mode` in a report, in its unit."""
    if mode == "startup":
        return report["first_step_s"]
    median_s = statistics.median(report["step_s"][WARM_UP_STEPS:])
    return median_s * 1e3 if mode == "empty" else median_s


def run_pair(args: argparse.Namespace, mode: str, baseline: str, ours_first: bool) -> Pair:
    """Returns the result of one run with the one line and one of `baseline`, one directly after the other."""
    flags = ["--model", "empty" if mode == "empty" else "llama", "--layers", str(args.layers),
             "--hidden", str(args.hidden), "--batch-size", str(args.batch_size), "--block-size", str(args.block_size),
             "--steps", str(args.steps), *(["--bf16"] if args.bf16 else [])]  # fmt: skip
    own = {"one_line": ["--plan", f"{PLAN_AXIS[baseline]}={args.workers}"], baseline: []}
    reports = {}
    for script in ("one_line", baseline) if ours_first else (baseline, "one_line"):
        reports[script] = run(script, [*flags, *own[script]], args.workers, args.threads, args.timeout)
    ours, theirs = reports["one_line"], reports[baseline]
    differences = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours["losses"], theirs["losses"], strict=True)]
    return Pair(baseline, measured(ours, mode), measured(theirs, mode), max(differences))


def compare(pair: Pair, mode: str) -> float:
    """Returns the ratio of a pair; for an empty model the difference, since the baseline is nearly nothing."""
    return pair.ours - pair.theirs if mode == "empty" else pair.ours / pair.theirs


def show(console: Console, pairs: list[Pair], mode: str) -> bool:
    """Prints the result of each baseline; returns whether all of them are within what we accept."""
    unit, title, limit = MODES[mode]
    shown = "{:+.3f}".format if mode == "empty" else "x{:.3f}".format
    table = Table(title=f"the one line against torchrun: {title}")
    for column in ("baseline", "pairs", f"one line [{unit}]", f"torchrun [{unit}]", "result", "lowest to highest",
                   "accepted", "losses differ by"):  # fmt: skip
        table.add_column(column, justify="left" if column == "baseline" else "right")
    all_within = True
    for baseline in dict.fromkeys(pair.baseline for pair in pairs):
        own = [pair for pair in pairs if pair.baseline == baseline]
        results = [compare(pair, mode) for pair in own]
        result = statistics.median(results)
        all_within = all_within and result <= limit
        table.add_row(
            baseline, str(len(own)), f"{statistics.median(pair.ours for pair in own):.3f}",
            f"{statistics.median(pair.theirs for pair in own):.3f}", f"[bold]{shown(result)}[/bold]",
            f"{shown(min(results))} to {shown(max(results))}", shown(limit),
            f"{max(pair.loss_difference for pair in own):.1e}",
        )  # fmt: skip
    console.print(table)
    return all_within


def parse_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--empty-model", dest="mode", action="store_const", const="empty", help="latency of a step")
    what.add_argument("--startup", dest="mode", action="store_const", const="startup", help="time to the first step")
    parser.add_argument("--against", nargs="+", choices=tuple(PLAN_AXIS), default=list(PLAN_AXIS))
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for each baseline")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each process")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16, help="global batch")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--steps", type=int, help="steps a run (default: 12; empty model 200; start-up 1)")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a run is given up")
    parser.add_argument("--json", type=Path, help="also write every pair to this file")
    args = parser.parse_args()
    args.mode = args.mode or "steps"
    args.steps = args.steps or {"steps": 12, "empty": 200, "startup": 1}[args.mode]
    if args.mode != "startup" and args.steps <= WARM_UP_STEPS:
        parser.error(f"--steps is {args.steps}; the first {WARM_UP_STEPS} are not counted, so more are needed")
    return args


def main() -> int:
    """Runs the command line; returns 0 if every result is within what we accept, else 1."""
    args, console = parse_arguments(), Console(width=140)
    pairs = []
    for number in range(args.pairs):
        for baseline in args.against:
            pair = run_pair(args, args.mode, baseline, ours_first=number % 2 == 0)
            pairs.append(pair)
            values = f"one line {pair.ours:.3f}, torchrun {pair.theirs:.3f} {MODES[args.mode][0]}"
            console.print(f"pair {number + 1}/{args.pairs} {baseline}: {values}", style="dim", highlight=False)
    within = show(console, pairs, args.mode)
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        document = {"settings": settings, "pairs": [asdict(pair) for pair in pairs]}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
