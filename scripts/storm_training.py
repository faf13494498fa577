#!/usr/bin/env python
"""The training that `storm.py` disturbs: an ordinary script, which knows nothing of what happens to its workers.

    python scripts/storm_training.py PLAN FOLDER [--lines N]

It trains one small GPT-2 after the other, with dropout, accumulation, clipping and a schedule. In between it evaluates,
saves, generates, and goes on with another model that has loaded what was saved. Of every number it prints a line: how
many there were, seconds, what it is, and all of its bits. Lines that begin with `>` say what it does next. It ends
after N lines, or at the next one once there is a file `enough` in FOLDER.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import moreh_ap
from moreh_ap.runtime.hangs import hang_watch
from moreh_ap.runtime.recovery import snapshot_timing

VOCABULARY, ROWS, TOKENS = 96, 8, 16
STEPS = 10
"""Of one model."""


class Lines:
    """What the script prints.

    Args:
        folder: Where `enough` may be.
        most: So many lines end it; None: it goes on.
    """

    def __init__(self, folder: Path, most: int | None) -> None:
        self._enough, self._most, self._count = folder / "enough", most, 0

    def number(self, name: str, value: Tensor) -> None:
        """Prints a number, or what stands for many; may end the script."""
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        bits = data.hex() if len(data) <= 8 else hashlib.sha256(data).hexdigest()
        self._count += 1
        print(f"{self._count} {time.monotonic():.3f} {name} {bits}\n", end="", flush=True)  # at once: others print, too
        if self._count == self._most or (self._most is None and self._enough.exists()):
            raise SystemExit(0)

    def next(self, what: str) -> None:
        """Says what is done next."""
        print(f"> {what}\n", end="", flush=True)


def build() -> GPT2LMHeadModel:
    """Returns a GPT-2 of half a million parameters, in which a copy of the workers' state takes milliseconds.

    They lie in two layers, as few as a pipeline has stages: what a step costs grows with the layers.
    """
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=136, n_layer=2, n_head=4, n_positions=TOKENS + 8,
                        bos_token_id=0, eos_token_id=0, pad_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config).cuda()


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)


def train(seed: int, folder: Path, lines: Lines) -> None:
    """Trains one model, from its first values to its last."""
    lines.next("building")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = build()
    optimizer, schedule = optimizer_of(model)

    def batch() -> Tensor:
        return torch.randint(1, VOCABULARY, (ROWS, TOKENS), generator=generator).cuda()

    for step in range(STEPS):
        losses = []
        for _ in range(2):
            ids = batch()
            loss = model(input_ids=ids, labels=ids).loss / 2
            loss.backward()
            losses.append(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 3 != 1:  # otherwise the next step is sent before this one is computed
            for loss in losses:
                lines.number("loss", loss)
            lines.number("norm", norm)
        if step == 3:
            lines.next("evaluating")
            model.eval()
            with torch.no_grad():
                lines.number("evaluation", model(input_ids=(ids := batch()), labels=ids).loss)
            model.train()
        elif step == 5:
            lines.next("saving")
            extra = {"schedule": schedule.state_dict(), "step": step}
            moreh_ap.save(folder / "saved", model=model, optimizer=optimizer, extra=extra)
            lines.next("saved")
        elif step == 6:
            lines.next("generating")
            model.eval()
            lines.number("tokens", model.generate(batch()[:2, :4], max_new_tokens=3, do_sample=False))
            model.train()
        elif step == 7:
            lines.next("loading")
            model = build()
            optimizer, schedule = optimizer_of(model)
            schedule.load_state_dict(moreh_ap.load(folder / "saved", model=model, optimizer=optimizer)["schedule"])
    weights = [parameter.detach().cpu().flatten() for parameter in model.parameters()]
    lines.number("weights", torch.cat(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lines", type=int, help="how many numbers (default: until there is a file `enough`)")
    parser.add_argument("--copies", type=int, default=3, help="workers copy what they hold every so many steps")
    parser.add_argument("--hang-s", type=float, default=5.0, help="what is silent for so long is taken to hang")
    arguments = parser.parse_args()
    snapshot_timing.STEPS, hang_watch.HANG_S = arguments.copies, arguments.hang_s
    torch.moreh.option.enable_advanced_parallelization(plan=arguments.plan, mixed_precision=False)
    lines = Lines(arguments.folder, arguments.lines)
    for seed in itertools.count():
        train(seed, arguments.folder, lines)


if __name__ == "__main__":
    main()
