#!/usr/bin/env python
"""Compares training with recovery from lost workers with training without it, plan by plan, in turns.

    python scripts/bench_recovery.py                                # six kinds of runs, three pairs each
    python scripts/bench_recovery.py --pairs 5 --seconds 60 empty   # one of them

Decides what is trained, and how runs are ordered: of a pair one run follows the other at once, in turns one first and
the other. A run is measured after the first copies of what workers hold, which are taken to memory that was never
touched; all copies after those are in it. Beside the time of a step stands the processor time of the script's process
and that of its workers, which says more on a machine that does other things, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

PLANS = {
    "replicate": "replicate=2",
    "shard": "shard=2",
    "tensor": "tensor=2",
    "pipeline": "pipeline=2,micro_batches=4",
    "hybrid": "shard=2,tensor=2",
    "empty": "replicate=2",
}
LAYERS, HIDDEN, ROWS, TOKENS = 4, 384, 8, 128
WITH, WITHOUT = "auto", "off"


class Cost(NamedTuple):
    """Of one run, a step: seconds, and seconds of the processor in the script's process and in all workers."""

    step_s: float
    script_s: float
    workers_s: float
    steps: int


def build(kind: str) -> tuple[nn.Module, torch.Tensor]:
    """Returns a Llama of 4 layers x 384, or a model without work, and its inputs."""
    torch.manual_seed(0)
    if kind == "empty":
        return nn.Linear(1, 1), torch.randn(8, 1)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=1024, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, num_hidden_layers=LAYERS,
                         num_attention_heads=6, num_key_value_heads=6, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config), torch.randint(0, 1024, (ROWS, TOKENS))


def run(kind: str, seconds: float) -> None:
    """Trains for a while; prints the costs of a step in the second half as JSON."""
    from moreh_ap import device

    torch.moreh.option.enable_advanced_parallelization(mixed_precision=False, plan=PLANS[kind])
    model, batch = build(kind)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        there = batch.cuda()
        loss = model(there).square().mean() if kind == "empty" else model(input_ids=there, labels=there).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    def train_for(seconds: float) -> tuple[int, float]:
        count, begun_s = 0, time.perf_counter()
        while time.perf_counter() - begun_s < seconds:
            step()
            count += 1
        return count, time.perf_counter() - begun_s

    step()
    workers = [psutil.Process(pid) for pid in device.current().session.workers.pids]

    def processor_s() -> tuple[float, float]:
        return time.process_time(), sum(sum(one.cpu_times()[:2]) for one in workers)

    train_for(seconds / 2)
    script_s, workers_s = processor_s()
    steps, wall_s = train_for(seconds / 2)
    after_script_s, after_workers_s = processor_s()
    cost = Cost(wall_s / steps, (after_script_s - script_s) / steps, (after_workers_s - workers_s) / steps, steps)
    print(json.dumps(cost._asdict()), flush=True)


def cost_of(kind: str, seconds: float, recovery: str) -> Cost:
    """Returns what a run costs that is a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MOREH_RECOVERY": recovery}
    command = [sys.executable, __file__, kind, "--seconds", str(seconds), "--run"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600 + seconds)
    if done.returncode != 0:
        raise SystemExit(f"a run ended with exit code {done.returncode}:\n{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Cost(**found)


def compare(kind: str, pairs: int, seconds: float) -> None:
    """Prints each pair of runs of a kind, and the medians."""
    more: list[list[float]] = []
    for number in range(pairs):
        order = (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH)
        found = {recovery: cost_of(kind, seconds, recovery) for recovery in order}
        there, without = found[WITH], found[WITHOUT]
        more.append([(a - b) / b for a, b in zip(there[:3], without[:3])])
        added_ms = (there.step_s - without.step_s) * 1e3
        print(
            f"{kind}: {without.steps} steps of {without.step_s * 1e3:.2f} ms without, {added_ms:+.3f} ms with: "
            + ", ".join(f"{what} {share:+.1%}" for what, share in zip(Cost._fields, more[-1])),
            flush=True,
        )
    medians = [statistics.median(column) for column in zip(*more)]
    print(f"{kind}, median: " + ", ".join(f"{what} {one:+.1%}" for what, one in zip(Cost._fields, medians)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", choices=[[], *PLANS], help="which runs (default: all)")
    parser.add_argument("--pairs", type=int, default=3, help="of each (default: 3)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run, of which half is measured")
    parser.add_argument("--run", action="store_true", help="one run, as the pairs make them")
    arguments = parser.parse_args()
    for kind in arguments.kinds or PLANS:
        if arguments.run:
            run(kind, arguments.seconds)
        else:
            compare(kind, arguments.pairs, arguments.seconds)


if __name__ == "__main__":
    main()
