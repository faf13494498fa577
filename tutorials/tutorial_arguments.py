"""Command line of the training scripts: the same flags in each, with the defaults of each.

Decides how flags are named, grouped and checked, and what `--embedded` stands for. Knows nothing of models, of data or
of the accelerator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tutorial_data import PREPARED, embedded_folder

POSITIVE = ("batch_size", "block_size", "epoch", "log_interval", "ckpt_freq")
NOT_NEGATIVE = ("max_steps", "eval_rows", "sample_tokens")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and the default behind each flag."""


def parse_training_arguments(
    description: str,
    public: Mapping[str, object],
    embedded: Mapping[str, object],
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> argparse.Namespace:
    """Returns the arguments of a training script.

    Args:
        description: What the script does; `--help` begins with it.
        public: Defaults, by name of the argument. A script without `block_size` among them has no such flag.
        embedded: Defaults that replace them under `--embedded`.
        add_arguments: Adds what only this script has; by default the held-out loss and the sample.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=_Formatter, allow_abbrev=False)
    data = parser.add_argument_group("model and data")
    data.add_argument("--embedded", action="store_true",
                      help="what scripts/prepare_tutorial.py prepares without a hub, and sizes for two CPU cores; "
                           "with --help, shows these defaults")  # fmt: skip
    data.add_argument("--model", "--model-name", help="name on the Hugging Face hub, or a folder")
    data.add_argument("--dataset", "--dataset-name", help="NAME or NAME:CONFIGURATION on the hub, or a folder")
    training = parser.add_argument_group("training")
    training.add_argument("--batch-size", type=int, help="sequences a step, over all devices together")
    if "block_size" in public:
        training.add_argument("--block-size", type=int, help="tokens a sequence")
    training.add_argument("--lr", type=float, help="learning rate")
    training.add_argument("--epoch", "--num-epochs", "--num-train-epochs", type=int, default=1,
                          help="passes over the data")  # fmt: skip
    training.add_argument("--max-steps", type=int, default=0, help="stop after so many steps; 0: none")
    training.add_argument("--seed", type=int, default=0, help="of the order of the rows, and of dropout")
    shown = parser.add_argument_group("what is shown and saved")
    shown.add_argument("--log-interval", "--log-freq", type=int, default=10, help="steps between two lines of progress")
    shown.add_argument("--save-path", "--save-dir", type=Path, help="folder for the result")
    devices = parser.add_argument_group("devices")
    devices.add_argument("--devices", type=int, help="how many to use; None: all")
    devices.add_argument("--plan", help='parallel plan, such as "replicate=2"; None: chosen for you')
    devices.add_argument("--no-ap", action="store_true", help="leave the one line out: one GPU, or one CPU process")
    (add_arguments or add_evaluation)(parser)
    parser.set_defaults(**public)
    if "--embedded" in sys.argv[1:]:
        parser.set_defaults(**embedded)
    args = parser.parse_args()
    _check(parser, args)
    for name in ("model", "dataset"):
        if args.embedded and getattr(args, name) in PREPARED:
            setattr(args, name, embedded_folder(getattr(args, name)))
    return args


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for what is looked at before and after training."""
    group = parser.add_argument_group("before and after")
    group.add_argument("--eval-rows", type=int, default=256, help="held-out rows whose loss is taken; 0: none")
    group.add_argument("--sample-tokens", type=int, default=64, help="length of the answer to one prompt; 0: none")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    values: dict[str, Any] = vars(args)
    for names, least in ((POSITIVE, 1), (NOT_NEGATIVE, 0)):
        for name in names:
            if name in values and values[name] < least:
                parser.error(f"--{name.replace('_', '-')} is {values[name]}; it must be at least {least}")
