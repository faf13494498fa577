#!/usr/bin/env python
"""Programs drawn at random: a small model trains, and the script changes something of it between steps.

    python tests/process/random_programs.py --plan shard=2 --programs 50 --seed 7

A program draws a model, an optimizer and a few of the changes in `random_changes.py` before each step. Its losses, and
all else that it reads, are the same on one device and on the accelerator. Found so: buffers and LSTM weights that a
`functional_call` had taken along, hooks that ran twice.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_changes import CHANGES
from random_models import CLASSES, MODELS, OPTIMIZERS, SETTINGS, TOKENS, Convolutional, Decoder, Recurrent, Residual
from torch import Tensor, nn

_STEPS, _TOLERANCE, _SMALLEST = 5, 5e-5, 1e-2


class Program:
    """One program.

    Args:
        seed: What it draws everything from.
        device: Where the model is.

    Attributes:
        changed: The names of what was changed, in order.
        numbers: What it has read.
    """

    def __init__(self, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        SETTINGS["gain"] = 1.0
        self.draw, self.device = random.Random(seed), device
        self.model: Any = self.draw.choice(MODELS)().to(device)
        self.has_tied_head = isinstance(self.model, Decoder)
        self.kind, self.rows, self.accumulated = self.draw.choice(OPTIMIZERS), 8, 1
        self.average: Any = None
        self.kept: dict[str, Tensor] | None = None
        self.handles: list[Any] = []
        self.penalty: Callable[[], Tensor] | None = None
        self.after_backward: list[Callable[[], Any]] = []
        self.changed: list[str] = [type(self.model).__name__]
        self.numbers: list[float] = []
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = self.kind([one for one in self.model.parameters() if one.requires_grad])

    def batch(self) -> tuple[Tensor, Tensor]:
        if self.has_tied_head:
            tokens = torch.randint(TOKENS, (self.rows, 8))
            return tokens[:, :-1].to(self.device), tokens[:, 1:].to(self.device)
        shape = {Residual: (6,), Convolutional: (3, 8, 8), Recurrent: (9,)}[type(self.model)]
        is_text = isinstance(self.model, Recurrent)
        x = torch.randint(TOKENS, (self.rows, *shape)) if is_text else torch.randn(self.rows, *shape)
        return x.to(self.device), torch.randint(CLASSES, (self.rows,)).to(self.device)

    def loss(self) -> Tensor:
        x, targets = self.batch()
        if self.has_tied_head and self.draw.random() < 0.5:
            return self.model(x, targets)  # type: ignore[no-any-return]
        return F.cross_entropy(self.model(x).flatten(0, -2), targets.flatten())

    def read(self, value: Tensor) -> None:
        self.numbers.append(float(value.detach()))

    def run(self) -> list[float]:
        """Trains, and returns what it has read."""
        for step in range(_STEPS):
            for _ in range(self.draw.choice([0, 1, 1, 2, 3]) if step else 0):
                name = self.draw.choice(list(CHANGES))
                self.changed.append(name)
                CHANGES[name](self)
            self.optimizer.zero_grad()
            for _ in range(self.accumulated):
                loss = self.loss() if self.penalty is None else self.loss() + self.penalty()
                if loss.requires_grad:
                    (loss / self.accumulated).backward()
                self.read(loss)
            for change in self.after_backward:
                change()
            if self.draw.random() < 0.5:
                self.after_backward = []
            self.optimizer.step()
        self.read(sum(one.detach().double().square().sum() for one in self.model.parameters()))  # type: ignore[arg-type]
        for buffer in self.model.buffers():
            self.read(buffer.double().nan_to_num(neginf=-1.0).abs().sum())
        return self.numbers

    # What changes draw: a layer, a parameter.

    def linear(self) -> nn.Linear:
        return self.draw.choice([one for one in self.model.modules() if type(one) is nn.Linear])

    def parameter(self) -> nn.Parameter:
        return self.draw.choice(list(self.model.parameters()))  # type: ignore[no-any-return]

    def parts(self, kind: type[nn.Module]) -> list[Any]:
        return [one for one in self.model.modules() if isinstance(one, kind)]

    def gradients(self) -> list[Tensor]:
        return [one.grad for one in self.model.parameters() if one.grad is not None]


def differences(seed: int) -> list[str]:
    """Returns where a program reads other numbers on the accelerator than on the CPU, and what it has changed."""
    expected = Program(seed, "cpu")
    wanted = expected.run()
    got = Program(seed, "cuda")
    found = got.run()
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
