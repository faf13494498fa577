"""Draws the loss of a training run into a PNG file. Knows numbers only, nothing of models or devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def save_loss_plot(path: Path, losses: Sequence[float], held_out: tuple[float, float], title: str) -> None:
    """Writes a plot of the training loss of each step and of the held-out loss before and after.

    Args:
        path: The PNG file.
        losses: Mean loss per token of each step, in order.
        held_out: Held-out loss before the first step and after the last.
        title: Text above the plot.
    """
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", alpha=0.8, label="training, each step")
    ends, label = (0, len(losses)), f"held-out, before {held_out[0]:.3f}, after {held_out[1]:.3f}"
    axes.plot(ends, held_out, "o", color="tab:orange", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title=title, xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
