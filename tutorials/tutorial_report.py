"""What a training run shows and keeps of itself: lines of progress, `losses.json`, a plot.

Decides when a loss is read and how it is shown. Knows numbers only, nothing of models or devices.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Progress:
    """Keeps the loss of every step and prints a line every few steps.

    Args:
        num_batches: Batches of one pass over the data.
        args: The script's arguments.

    Raises:
        SystemExit: The data do not fill one batch.
    """

    def __init__(self, num_batches: int, args: argparse.Namespace) -> None:
        if num_batches < 1:
            raise SystemExit(f"the training rows do not fill one batch of {args.batch_size}; lower --batch-size")
        self.num_epochs, self.interval, self.title = args.epoch, args.log_interval, Path(args.model).name
        self.num_steps = min(args.max_steps or args.epoch * num_batches, args.epoch * num_batches)
        self._losses: list[Any] = []
        self._tokens, self._since_s = 0, time.perf_counter()
        print(f"training: {self.num_steps} steps of {args.batch_size} sequences", flush=True)

    @property
    def done(self) -> bool:
        """Whether all steps have been taken."""
        return len(self._losses) >= self.num_steps

    def step(self, epoch: int, loss: Any, num_tokens: int) -> None:
        """Takes note of a step, and prints if its line is due.

        Args:
            epoch: Counted from 0.
            loss: A tensor with one element.
            num_tokens: Tokens of the global batch, pads counted.
        """
        self._losses.append(loss.detach())
        self._tokens += num_tokens
        step = len(self._losses)
        if step % self.interval == 0 or step == self.num_steps:
            value, now_s = loss.item(), time.perf_counter()
            speed = self._tokens / (now_s - self._since_s)
            print(f"[epoch {epoch + 1}/{self.num_epochs}, step {step}/{self.num_steps}] loss {value:.4f}, "
                  f"{speed:,.0f} tokens/s", flush=True)  # fmt: skip
            self._tokens, self._since_s = 0, now_s

    def save(self, folder: Path, before: float | None, after: float | None) -> None:
        """Writes `losses.json` and `loss.png` into `folder`.

        Args:
            folder: Made if it is not there.
            before: Held-out loss before the first step, if it was taken.
            after: Held-out loss after the last.
        """
        losses = [loss.item() for loss in self._losses]
        folder.mkdir(parents=True, exist_ok=True)
        content = {"losses": losses, "held_out_before": before, "held_out_after": after}
        (folder / "losses.json").write_text(json.dumps(content, indent=1) + "\n")
        held_out = None if before is None or after is None else (before, after)
        save_loss_plot(folder / "loss.png", losses, held_out, self.title)
        if held_out is not None:
            print(f"held-out loss before: {before:.4f}, after: {after:.4f}")
        print(f"losses saved to {folder / 'losses.json'}, plot to {folder / 'loss.png'}")


def save_loss_plot(path: Path, losses: Sequence[float], held_out: tuple[float, float] | None, title: str) -> None:
    """Writes a plot of the training loss of each step and of the held-out loss before and after.

    Args:
        path: The PNG file.
        losses: Mean loss per token of each step, in order.
        held_out: Held-out loss before the first step and after the last, if there is one.
        title: Text above the plot.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.8, label="training, each step")
    if held_out is not None:
        label = f"held-out, before {held_out[0]:.3f}, after {held_out[1]:.3f}"
        axes.plot((0, len(losses)), held_out, "o", color="tab:orange", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
