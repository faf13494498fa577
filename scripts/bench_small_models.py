#!/usr/bin/env python
"""Times scripts with small models: in one process, with the one line, and on two workers.

    python scripts/bench_small_models.py                      # three rounds of each script, in turn
    python scripts/bench_small_models.py classifier --rounds 5
    python scripts/bench_small_models.py --without workers    # leaves one way out

Decides what the scripts compute, and how runs are ordered. Each run is a process of its own, and reports the median of
its steps and a loss; the ratio is taken within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

WAYS = ("process", "line", "workers")
WARM_UP_S = 1.0  # and at least as many steps as are timed in both places at first
MIN_WARM_UP_STEPS = 15
MEASURED_S = 4.0


def actor_critic(device: str) -> Callable[[], Tensor]:
    """An update after 40 actions, each drawn by a network for one state, as in reinforcement learning."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.action, self.value = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

        def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
            hidden = F.relu(self.hidden(state))
            return F.softmax(self.action(hidden), dim=-1), self.value(hidden)

    model = Policy().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step() -> Tensor:
        log_probs, values, rewards = [], [], []
        state = torch.zeros(4, device=device)
        for turn in range(40):
            probs, value = model(state)
            actions = torch.distributions.Categorical(probs)
            action = actions.sample()
            log_probs.append(actions.log_prob(action))
            values.append(value)
            rewards.append(1.0 if action.item() == turn % 2 else 0.0)
            state = torch.tensor([turn / 40, turn % 2, rewards[-1], 1.0], device=device)
        returns, total = [], 0.0
        for reward in reversed(rewards):
            total = reward + 0.99 * total
            returns.insert(0, total)
        target = torch.tensor(returns, device=device)
        target = (target - target.mean()) / (target.std() + 1e-6)
        policy_losses, value_losses = [], []
        for log_prob, value, one in zip(log_probs, values, target):
            policy_losses.append(-log_prob * (one - value.item()))
            value_losses.append(F.smooth_l1_loss(value, one.reshape(1)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        return loss

    return step


def classifier(device: str) -> Callable[[], Tensor]:
    """A step of two layers on 32 rows."""
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        x, y = torch.randn(32, 20).to(device), torch.randint(3, (32,)).to(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def transformer(device: str) -> Callable[[], Tensor]:
    """A step of 290 MFLOP: three layers of width 48, 16 rows of 32 tokens."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(48, 4, 192, 0.1, batch_first=True)
            self.tokens, self.head = nn.Embedding(64, 48), nn.Linear(48, 64)
            self.blocks = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.tokens(ids)))  # type: ignore[no-any-return]

    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> Tensor:
        ids = torch.randint(64, (16, 32)).to(device)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


SCRIPTS: dict[str, tuple[Callable[[str], Callable[[], Tensor]], int]] = {
    "actor_critic": (actor_critic, 1),
    "classifier": (classifier, 1),
    "transformer": (transformer, 2),
}
"""By name: the script, and the threads of one process."""


def run(name: str, way: str) -> dict[str, float]:
    """Returns the median seconds of a step of this process, and the loss after the first steps."""
    make, threads = SCRIPTS[name]
    torch.set_num_threads(threads)
    if way != "process":
        torch.moreh.option.enable_advanced_parallelization(**({"plan": "replicate=2"} if way == "workers" else {}))  # type: ignore[attr-defined]
    torch.manual_seed(0)
    step = make("cpu" if way == "process" else "cuda")
    began, num_steps, loss = time.perf_counter(), 0, float("nan")
    while num_steps < MIN_WARM_UP_STEPS or time.perf_counter() - began < WARM_UP_S:
        num_steps += 1
        result = step()
        if num_steps == MIN_WARM_UP_STEPS:
            loss = result.item()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or time.perf_counter() - began < MEASURED_S:
        before = time.perf_counter()
        step().item()
        seconds.append(time.perf_counter() - before)
    return {"step_s": statistics.median(seconds), "loss": loss}


def run_apart(name: str, way: str) -> dict[str, float]:
    """Returns the result of `run` in a process of its own.

    Raises:
        RuntimeError: The process ended with an error, whose text the message carries.
    """
    command = [sys.executable, os.path.abspath(__file__), name, "--run", way]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RuntimeError(f"{name}, {way}: exit status {ended.returncode}\n{ended.stderr[-2000:]}")
    result: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return result


def describe(values: list[float], format: Callable[[float], str]) -> str:
    """Returns the median, and the range in parentheses."""
    return f"{format(statistics.median(values))} ({format(min(values))} to {format(max(values))})"


def compare(name: str, rounds: int, ways: list[str]) -> list[str]:
    """Returns a row of the table: each way's milliseconds, and its ratio to one process."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for number in range(rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            found[way].append(run_apart(name, way))
    row = [name]
    for way in ways:
        text = describe([one["step_s"] * 1e3 for one in found[way]], "{:.3g}".format)
        if way != "process":
            ratios = [one["step_s"] / alone["step_s"] for one, alone in zip(found[way], found["process"])]
            text += f", x{describe(ratios, '{:.2f}'.format)}"
        row.append(text)
    losses = [one["loss"] for runs in found.values() for one in runs]
    row.append(f"{max(losses) - min(losses):.1e}")
    return row


def main() -> None:
    """Prints a table of all scripts asked for, or what one run measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(SCRIPTS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", action="append", default=[], choices=WAYS[1:])
    parser.add_argument("--run", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCRIPTS]
    if unknown:
        parser.error(f"no script is called {', '.join(unknown)}: there are {', '.join(SCRIPTS)}")
    if options.run:
        print(json.dumps(run(options.names[0], options.run)), flush=True)
        return
    ways = [way for way in WAYS if way not in options.without]
    heads: list[Any] = ["script", *(f"{way}, ms a step" for way in ways), "losses differ by"]
    table = Table(*heads)
    for name in options.names or SCRIPTS:
        table.add_row(*compare(name, options.rounds, ways))
    Console().print(table)


if __name__ == "__main__":
    main()
