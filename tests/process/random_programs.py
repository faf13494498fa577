#!/usr/bin/env python
"""Programs drawn at random: a small model trains, and the script changes something of it between steps.

    python tests/process/random_programs.py --plan shard=2 --programs 50 --seed 7

A program draws a model, an optimizer and a few of the changes in `random_changes.py` before each step. Its losses, and
all else that it reads, are the same on one device and on the accelerator. Found so: buffers and LSTM weights that a
`functional_call` had taken along, hooks that ran twice.
"""

from __future__ import annotations

import argparse
import sys

import torch
from random_changes import CHANGES
from random_training import Program

_TOLERANCE, _SMALLEST = 5e-5, 1e-2


def differences(seed: int) -> list[str]:
    """Returns where a program reads other numbers on the accelerator than on the CPU, and what it has changed."""
    expected = Program(seed, "cpu")
    wanted = expected.run(CHANGES)
    got = Program(seed, "cuda")
    found = got.run(CHANGES)
    if len(wanted) != len(found):
        return [f"program {seed} reads {len(found)} numbers in place of {len(wanted)}: {' '.join(got.changed)}"]
    return [
        f"program {seed}, number {at} of {len(wanted)}: {b!r} in place of {a!r}: {' '.join(got.changed)}"
        for at, (a, b) in enumerate(zip(wanted, found))
        if not abs(a - b) <= _TOLERANCE * max(abs(a), _SMALLEST)
    ]


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="replicate=2")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    arguments = parser.parse_args()
    torch.moreh.option.enable_advanced_parallelization(  # type: ignore[attr-defined]
        plan=arguments.plan, devices=arguments.devices, mixed_precision=False
    )
    wrong = [line for seed in range(arguments.seed, arguments.seed + arguments.programs) for line in differences(seed)]
    print(*wrong, f"{arguments.programs} programs, {len(wrong)} numbers differ", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
