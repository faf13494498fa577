#!/usr/bin/env python
"""Measures what the one line costs beside the torchrun scripts that one would otherwise write.

    python scripts/bench_overhead.py                  # step time, against DDP and FSDP2
    python scripts/bench_overhead.py --empty-model    # milliseconds that the controller adds to a step
    python scripts/bench_overhead.py --startup        # start of the process to the end of the first step
    python scripts/bench_overhead.py --controller     # Python calls and CPU time of a step in the script's process
    python scripts/bench_overhead.py --against tp     # tensor parallelism; pp and 3d likewise
    python scripts/bench_overhead.py --against pp --plan pipeline=2,micro_batches=8,schedule=gpipe

Decides how runs are paired and what is printed. The runs are those of `tutorials/manual`: same model, tokens, steps,
devices and threads; the flags of the torchrun script follow from the plan that the one line gets. The two runs of a
pair follow each other at once, in turns one first and the other, so that a machine that becomes slower meanwhile is
slower for both; the ratio is taken within each pair, and the median over the pairs is the result. `--controller` pairs
nothing: it counts, with `scripts/controller_weight.py`.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moreh_ap.plan import Plan

SCRIPTS = Path(__file__).resolve().parents[1] / "tutorials" / "manual"
ONE_LINE, SINGLE = "one_line", "single"  # the scripts that no launcher starts
PIPELINE_NAMES = ("pipeline", "micro_batches", "schedule", "stages_per_device", "layers")
PLAN_NAMES = {  # baseline: what its script can do, in the words of a plan
    "ddp": ("replicate", "micro_batches"),
    "fsdp": ("replicate", "shard", "micro_batches"),
    "tp": ("tensor", "sequence_parallel", "micro_batches"),
    "pp": PIPELINE_NAMES,
    "3d": ("replicate", "shard", "tensor", *PIPELINE_NAMES),
    "deepspeed": ("shard", "micro_batches"),
}
WARM_UP_STEPS = 2
CONTROLLER = Path(__file__).parent / "controller_weight.py"
CONTROLLER_LAYERS = (2, 16, 64, 111)  # of the counted models: 21, 147, 579 and 1,002 parameter tensors
CONTROLLER_WORKERS = (1, 2, 4, 8)
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
        baseline: One of `PLAN_NAMES`.
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


def default_plan(baseline: str, devices: int | None) -> Plan:
    """Returns the plan that a baseline is compared under when none is given.

    Args:
        baseline: One of `PLAN_NAMES`.
        devices: Number of devices; None means 2, and 8 for `3d`.
    """
    if baseline == "3d":
        return Plan(shard=(devices or 8) // 4, tensor=2, pipeline=2)
    axis = {"ddp": "replicate", "fsdp": "shard", "tp": "tensor", "pp": "pipeline", "deepspeed": "shard"}[baseline]
    return Plan(**{axis: devices or 2})


def flags_of_plan(baseline: str, plan: Plan, num_layers: int) -> list[str]:
    """Returns the flags with which a torchrun script carries out `plan`.

    Args:
        baseline: One of `PLAN_NAMES`.
        plan: The plan of the one line.
        num_layers: Layers of the model, from which the stages of a pipeline follow.

    Raises:
        ValueError: The plan asks for something that the script cannot do.
    """
    asked_for = [name for name, value in vars(plan).items() if value != _neutral(name)]
    unknown = [name for name in asked_for if name not in PLAN_NAMES[baseline]]
    if unknown:
        raise ValueError(f"plan {str(plan)!r}: the script for {baseline} knows {', '.join(PLAN_NAMES[baseline])} only, "
                         f"not {', '.join(unknown)}")  # fmt: skip
    flags = ["--micro-batches", str(plan.micro_batches)]
    if baseline in ("fsdp", "3d"):
        flags += ["--replicate", str(plan.replicate)]
    if baseline == "tp" and plan.sequence_parallel:
        flags += ["--sequence-parallel"]
    if baseline == "3d":
        flags += ["--tensor", str(plan.tensor), "--pipeline", str(plan.pipeline)]
    if baseline in ("pp", "3d"):
        stages = "+".join(str(len(layers)) for layers in plan.stage_ranges(num_layers))
        flags += ["--schedule", plan.schedule, "--split", stages]
        if plan.schedule == "interleaved":
            flags += ["--stages-per-device", str(plan.stages_per_device)]
    return flags


def _neutral(name: str) -> object:
    """Returns the value of a field of plans that changes nothing."""
    return getattr(Plan(), name)


def run(script: str, flags: list[str], devices: int, threads: int, timeout_s: float) -> dict:
    """Runs one script of `tutorials/manual` in fresh processes and returns its report.

    Args:
        script: `one_line`, `single` or one of `PLAN_NAMES`.
        flags: Flags that all of them take, and those of this script.
        devices: Processes for torchrun.
        threads: `OMP_NUM_THREADS` of every process.
        timeout_s: The run is killed after so many seconds.

    Raises:
        RunFailed: It ended with an error, or was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        path = str(SCRIPTS / f"train_{script}.py")
        if script in (ONE_LINE, SINGLE):
            command = [sys.executable, path]  # the plan of the one line says how many devices
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices),
                       path]  # fmt: skip
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


def run_both(args: argparse.Namespace, mode: str, baseline: str, ours_first: bool) -> dict[str, dict]:
    """Returns the reports of one run with the one line and one of `baseline`, one directly after the other.

    Args:
        args: The command line.
        mode: One of `MODES`.
        baseline: One of `PLAN_NAMES`.
        ours_first: Which of the two runs first; the reports are in that order, by script.
    """
    plan = args.plan or default_plan(baseline, args.devices)
    flags = ["--layers", str(args.layers), "--hidden", str(args.hidden), "--batch-size", str(args.batch_size),
             "--block-size", str(args.block_size), "--steps", str(args.steps), *(["--bf16"] if args.bf16 else []),
             *(["--model", "empty"] if mode == "empty" else [])]  # fmt: skip
    own_plan = replace(plan, precision="bf16") if args.bf16 else plan
    own = {ONE_LINE: ["--plan", str(own_plan)], baseline: flags_of_plan(baseline, plan, args.layers)}
    reports = {}
    for script in (ONE_LINE, baseline) if ours_first else (baseline, ONE_LINE):
        reports[script] = run(script, [*flags, *own[script]], plan.num_devices, args.threads, args.timeout)
    return reports


def run_pair(args: argparse.Namespace, mode: str, baseline: str, ours_first: bool) -> Pair:
    """Returns the result of one run with the one line and one of `baseline`, one directly after the other."""
    reports = run_both(args, mode, baseline, ours_first)
    ours, theirs = reports[ONE_LINE], reports[baseline]
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


def show_controller(args: argparse.Namespace, console: Console) -> None:
    """Prints what a step costs the script's process, for models of several sizes and several numbers of workers.

    Raises:
        RunFailed: A run ended with an error, or took too long.
    """
    table = Table(title="a step in the script's process")
    for column in ("workers", "parameters", "key-value cache", "Python calls", "CPU [ms]", "PyTorch on meta, CPU [ms]"):
        table.add_column(column, justify="right")
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            command = [sys.executable, str(CONTROLLER), "--workers", str(workers), "--json", str(report)]
            command += ["--cache", "no", "yes", "--layers", *map(str, args.controller_layers)]
            status, output = _run_group(command, environment, folder, args.timeout)
            if status != 0:
                raise RunFailed(f"{CONTROLLER.name} ended with status {status}:\n{output[-4000:]}")
            for one in json.loads(report.read_text()):
                table.add_row(
                    str(workers), f"{one['parameters']:,}", "yes" if one["with_cache"] else "no", f"{one['calls']:,}",
                    f"{one['cpu_ms']:.1f}", f"{one['meta_cpu_ms']:.1f}",
                )  # fmt: skip
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--empty-model", dest="mode", action="store_const", const="empty", help="latency of a step")
    what.add_argument("--startup", dest="mode", action="store_const", const="startup", help="time to the first step")
    what.add_argument("--controller", action="store_true", help="calls and CPU time of a step in the script's process")
    parser.add_argument("--workers", type=int, nargs="+", default=CONTROLLER_WORKERS, help="of --controller")
    parser.add_argument("--controller-layers", type=int, nargs="+", default=CONTROLLER_LAYERS, help="of --controller")
    parser.add_argument("--against", nargs="+", choices=tuple(PLAN_NAMES), default=["ddp", "fsdp"])
    parser.add_argument("--plan", type=Plan.parse, help="plan of both runs of a pair (default: the script's own axis)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs for each baseline")
    parser.add_argument("--devices", type=int, help="devices of both runs (default: the plan's, else 2, and 8 for 3d)")
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
    if args.mode == "empty" and not set(args.against) <= {"ddp", "fsdp"}:
        parser.error("--empty-model can be measured against ddp and fsdp: the other scripts split a Llama")
    for baseline in args.against:
        plan = args.plan or default_plan(baseline, args.devices)
        if args.devices not in (None, plan.num_devices):
            parser.error(f"--devices is {args.devices}, the plan {str(plan)!r} needs {plan.num_devices}")
        try:
            flags_of_plan(baseline, plan, args.layers)
        except ValueError as error:  # a PlanError is one too
            parser.error(str(error))
    return args


def main() -> int:
    """Runs the command line; returns 0 if every result is within what we accept, else 1."""
    args, console = parse_arguments(), Console(width=140)
    if args.controller:
        show_controller(args, console)
        return 0
    pairs = []
    for number in range(args.pairs):
        for baseline in args.against:
            pair = run_pair(args, args.mode, baseline, ours_first=number % 2 == 0)
            pairs.append(pair)
            values = f"one line {pair.ours:.3f}, torchrun {pair.theirs:.3f} {MODES[args.mode][0]}"
            console.print(f"pair {number + 1}/{args.pairs} {baseline}: {values}", style="dim", highlight=False)
    within = show(console, pairs, args.mode)
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name not in ("json", "plan")}
        settings["plan"] = None if args.plan is None else str(args.plan)
        document = {"settings": settings, "pairs": [asdict(pair) for pair in pairs]}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
