#!/usr/bin/env python
"""Compares a split training step with what the machine can give: two independent processes with half the batch each.

    python scripts/bench_split.py                 # a ResNet-18 with two sizes of pictures, three rounds
    python scripts/bench_split.py --rounds 5 --size 64x96

Decides what is trained, and how runs are ordered. In each round one process with one thread takes the whole batch, two
such processes take half of it each at the same time, and the one line takes the whole batch on two workers with one
thread each. The ceiling is the first time divided by the second, the speed-up the first divided by the third. Losses of
the line and of one process in float64 are set beside those of one process: both differ by rounding.
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

import torch
import torch.nn.functional as F

WARM_UP_STEPS = 4
MEASURED_S = 6.0
MIN_MEASURED_STEPS = 4
NUM_CLASSES = 10


class Size(NamedTuple):
    """Pictures of a batch, and pixels of each of their sides. Written as ``32x96``."""

    rows: int
    side: int

    @classmethod
    def parse(cls, text: str) -> Size:
        """Raises a ValueError for what is not two numbers."""
        rows, side = text.split("x")
        return cls(int(rows), int(side))

    def __str__(self) -> str:
        return f"{self.rows}x{self.side}"


SIZES = (Size(32, 96), Size(16, 224))
WAYS = ("plain", "float64", "line")


def run(size: Size, way: str) -> None:
    """Trains on pictures of this size in one of the `WAYS`; prints median seconds of a step, and losses, as JSON."""
    from transformers import ResNetConfig, ResNetForImageClassification

    if way == "line":
        torch.moreh.option.enable_advanced_parallelization(mixed_precision=False, plan="replicate=2")
    torch.manual_seed(0)
    widths, depths = [64, 128, 256, 512], [2, 2, 2, 2]
    config = ResNetConfig(hidden_sizes=widths, depths=depths, layer_type="basic", num_labels=NUM_CLASSES)
    device = "cuda" if way == "line" else "cpu"
    model = ResNetForImageClassification(config).to(device)
    dtype = torch.float64 if way == "float64" else torch.float32
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # SGD with momentum makes much of rounding here
    pictures = torch.randn(size.rows, 3, size.side, size.side)
    labels = torch.randint(0, NUM_CLASSES, (size.rows,))
    times_s: list[float] = []
    losses = []
    while len(times_s) < WARM_UP_STEPS + MIN_MEASURED_STEPS or sum(times_s[WARM_UP_STEPS:]) < MEASURED_S:
        begin_s = time.perf_counter()
        loss = F.cross_entropy(model(pictures.to(device, dtype)).logits, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times_s.append(time.perf_counter() - begin_s)
    print(json.dumps({"step_s": statistics.median(times_s[WARM_UP_STEPS:]), "losses": losses}), flush=True)


def start(size: Size, *arguments: str) -> subprocess.Popen[str]:
    """Starts a run in a process of its own, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MOREH_NUM_DEVICES": "2"}
    command = [sys.executable, __file__, "--size", str(size), "--run", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns what a run has printed last."""
    out, _ = process.communicate(timeout=600)
    if process.returncode != 0:
        raise SystemExit(f"a run ended with exit code {process.returncode}:\n{out}")
    result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return result


def compare(size: Size, number: int) -> float:
    """Runs a round, prints what it showed, and returns the share of the ceiling that the line reached."""
    whole = finish(start(size, "plain"))
    halves = [start(Size(size.rows // 2, size.side), "plain") for _ in range(2)]
    half_s = max(finish(half)["step_s"] for half in halves)
    line = finish(start(size, "line"))
    whole_s, line_s = whole["step_s"], line["step_s"]
    print(
        f"round {number}: one process {whole_s:.3f} s, ceiling x{whole_s / half_s:.2f}, "
        f"the line x{whole_s / line_s:.2f}, {half_s / line_s:.2f} of the ceiling"
    )
    print(f"  largest difference of a loss: {apart(whole, line):.1e}")
    if number == 1:
        print(f"  of one process in float64: {apart(whole, finish(start(size, 'float64'))):.1e}")
    return half_s / line_s


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference of a loss in two runs."""
    return max(abs(a - b) for a, b in zip(one["losses"], other["losses"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=Size.parse, action="append", help="pictures x pixels of a side, such as 32x96")
    parser.add_argument("--run", choices=WAYS, help="one run, as the rounds make them")
    arguments = parser.parse_args()
    sizes = arguments.size or SIZES
    if arguments.run:
        run(sizes[0], arguments.run)
        return
    for size in sizes:
        print(f"{size.rows} pictures of {size.side} x {size.side}")
        shares = [compare(size, number + 1) for number in range(arguments.rounds)]
        print(f"median: {statistics.median(shares):.2f} of the ceiling")


if __name__ == "__main__":
    main()
