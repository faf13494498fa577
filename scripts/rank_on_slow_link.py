#!/usr/bin/env python
"""Ten plans on two hosts with a slow link between them: what the planner predicts, and what they take.

    make rank-hosts                                    # on an idle machine
    python scripts/rank_on_slow_link.py --rate 200     # Mbit/s; root, iproute2 and sshd

The hosts are network namespaces with a real sshd and two CPU workers each (`tests/process/hosts_lab.py`). What they
send is slowed down by `tc`: by netem, which adds 1 ms as well, where the kernel has it, else by a token bucket (tbf).
The first line says which. Links are measured by the workers, as in any run. Each plan divides the devices in another
way, and trains a model of its own in one process; rounds go through the plans in turn, forwards and backwards, and none
begins that would end after the given minutes, by the time that the first has taken. Exits
with 1 if the planner's first choice takes more than 1.05 of the fastest plan.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

LIMIT = 1.05
NUM_PLANS = 10
DEVICES = 4


def run_in_lab(arguments: argparse.Namespace) -> int:
    """Makes the hosts and runs this script on a third one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "process"))
    from hosts_lab import MISSING, Lab

    if MISSING:
        print(f"needs {', '.join(MISSING)}")
        return 2
    lab = Lab()
    try:
        how = {lab.slow_down(host, arguments.rate) for host in "ab"}
        print(f"link between the hosts: {', '.join(how)}", flush=True)
        child = lab.start(Path(__file__).absolute(), "--child", *sys.argv[1:])
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
        return child.wait()
    finally:
        lab.close()


def rank(arguments: argparse.Namespace) -> int:
    """Predicts, measures and shows; returns the exit status."""
    from bench_planner import Measured, Workload, step_of, task_of
    from transformers import LlamaConfig

    from moreh_ap import device
    from moreh_ap.accelerator.enabling import enable
    from moreh_ap.hosts.host_list import parse_hosts
    from moreh_ap.planner.search.candidate import Candidate
    from moreh_ap.planner.search.plan_search import search
    from moreh_ap.settings import Options

    config = LlamaConfig(
        vocab_size=2048, hidden_size=arguments.hidden, intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers, num_attention_heads=8, num_key_value_heads=4,
    )  # fmt: skip
    work = Workload(config, arguments.batch, arguments.length)
    options = Options(devices=DEVICES, mixed_precision=False, hosts=parse_hosts(os.environ["MOREH_HOSTS"]))
    enable(options)
    timed = [one for one in search(task_of(options, work)).candidates if one.step is not None]
    axes: dict[tuple[object, ...], Candidate] = {}  # of each division over the devices the plan that is predicted best
    for one in timed:
        plan = one.plan
        axes.setdefault((plan.replicate, plan.shard, plan.tensor, plan.sequence_parallel, plan.pipeline), one)
    shown = list(axes.values())[:NUM_PLANS]
    predicted = {one.plan: one.step for one in shown if one.step is not None}
    measured = {plan: Measured(float("inf"), float("inf")) for plan in predicted}
    began_s, num_rounds = time.monotonic(), 0
    for number in range(arguments.rounds):
        spent_s = time.monotonic() - began_s
        if number and spent_s / number + spent_s > 60 * arguments.minutes:
            break
        num_rounds += 1
        for plan in list(measured) if number % 2 == 0 else list(reversed(measured)):
            measured[plan] = measured[plan].least(step_of(plan, replace(options), work))
    best_s, first = min(one.seconds for one in measured.values()), next(iter(predicted))
    table = Table(title=f"{len(predicted)} of {len(timed)} plans, as predicted")
    for column in ("plan", "predicted [ms]", "of it exchanges", "measured [ms]", "of the best"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for plan, step in predicted.items():
        part = (step.data_s + step.tensor_s + step.pipeline_s) / step.total_s
        taken_s = measured[plan].seconds
        table.add_row(str(plan), f"{step.total_s * 1e3:.0f}", f"{part:.0%}", f"{taken_s * 1e3:.0f}",
                      f"x{taken_s / best_s:.2f}")  # fmt: skip
    Console(width=118).print(table)
    ratio = measured[first].seconds / best_s
    rounds = f"{num_rounds} rounds in {(time.monotonic() - began_s) / 60:.1f} minutes"
    print(f"{first}: x{ratio:.3f} of the fastest measured plan (accepted: x{LIMIT}; {rounds})", flush=True)
    if arguments.json is not None:
        rows = [{"plan": str(plan), "predicted_s": step.total_s, "measured_s": measured[plan].seconds}
                for plan, step in predicted.items()]  # fmt: skip
        arguments.json.write_text(json.dumps({"rate_mbit": arguments.rate, "plans": rows}, indent=1) + "\n")
    device.disable()
    return 0 if ratio <= LIMIT else 1


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=200, help="Mbit/s that each host may send")
    parser.add_argument("--rounds", type=int, default=2, help="each is the median of five steps")
    parser.add_argument("--minutes", type=float, default=5.0, help="of all rounds; one is always measured")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 8")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return rank(arguments) if arguments.child else run_in_lab(arguments)


if __name__ == "__main__":
    sys.exit(main())
