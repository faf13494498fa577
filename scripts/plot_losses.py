"""Draws the `losses.json` that a training script of `tutorials/` wrote: the loss of each step, and the held-out loss.

    python scripts/plot_losses.py outputs/train_gpt                    # writes outputs/train_gpt/loss.png
    python scripts/plot_losses.py one two --output comparison.png      # two runs in one picture

Knows the file alone: `{"losses": [...], "held_out_before": number or null, "held_out_after": number or null}`, or, from
`train_llm.py`, the list of logged losses.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

FILE = "losses.json"


def plot_losses(folders: Sequence[Path], output: Path) -> None:
    """Writes a PNG with the losses of each folder, in nats a token, over the steps."""
    import matplotlib

    matplotlib.use("Agg")  # a file, no window
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for folder in folders:
        content = json.loads((folder / FILE).read_text())
        run = content if isinstance(content, dict) else {"losses": content}
        losses, held_out = run["losses"], (run.get("held_out_before"), run.get("held_out_after"))
        (line,) = axes.plot(range(1, len(losses) + 1), losses, alpha=0.8, label=f"{folder.name}, training")
        if None not in held_out:
            label = f"{folder.name}, held-out: before {held_out[0]:.3f}, after {held_out[1]:.3f}"
            axes.plot((0, len(losses)), held_out, "o", color=line.get_color(), label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=f"folder with a {FILE}")
    parser.add_argument("--output", type=Path, help="the picture (default: loss.png in the first folder)")
    options = parser.parse_args(arguments)
    for folder in options.folders:
        if not (folder / FILE).is_file():
            parser.error(f"{folder / FILE} does not exist; a training script of tutorials/ writes it")
    output = options.output or options.folders[0] / "loss.png"
    plot_losses(options.folders, output)
    print(f"plot saved to {output}")


if __name__ == "__main__":
    main()
